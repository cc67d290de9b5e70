"""What is written so that a run can go on, and that it is whole."""
