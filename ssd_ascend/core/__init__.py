"""The vocabulary every room shares; importing it never imports torch."""
