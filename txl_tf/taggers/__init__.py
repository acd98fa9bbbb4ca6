"""TENER, FLAT and the tagger around them."""
