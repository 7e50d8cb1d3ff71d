"""How chunks of a version travel between relays; `base` says what a transport must do."""
