"""How ranks are started, joined and watched, and how messages pass between them."""
