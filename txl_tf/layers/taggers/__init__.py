"""The layers of TENER and FLAT, and the conditional random field."""
