"""The headers of image files: format, size, truncation."""
