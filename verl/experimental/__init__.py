"""Import paths that older code uses; the code itself is elsewhere."""
