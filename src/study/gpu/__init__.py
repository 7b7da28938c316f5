"""The study on a GPU: the measurements of `make gpu` and the report's chapter on them."""
