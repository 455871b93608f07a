"""Foreign logs to the native format, one module a format."""
