"""Choosing among members: searches and cross-validation; what is trained and how is the caller's."""
