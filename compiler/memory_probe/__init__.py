"""What one op keeps and allocates, found by running it without storage."""
