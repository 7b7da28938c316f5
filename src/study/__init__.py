"""The study: what the notebooks need and a user of the library does not."""
