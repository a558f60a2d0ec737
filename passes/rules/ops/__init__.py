"""Rules of single ops, one file per family of ops, as dim labels."""
