"""Members that learn from one another: copies of one network that are averaged."""
