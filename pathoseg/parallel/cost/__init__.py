"""What layers and links take on a device."""
