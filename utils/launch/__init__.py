"""What starts, watches and ends processes."""
