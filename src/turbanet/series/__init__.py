"""Forecasts of many series, from a long table of them."""
