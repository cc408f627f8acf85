"""The cost of layers and links on a device."""
