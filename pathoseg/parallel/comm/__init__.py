"""Communication: ranks are started, joined and watched, and pass messages."""
