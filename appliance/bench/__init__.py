"""The benches that travel with the image."""
