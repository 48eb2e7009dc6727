"""The laws: what every legal model obeys, stated so that it can be checked on any of them."""
