"""Figures that stages share: names, colours and markers, curves and maps."""
