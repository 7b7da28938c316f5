"""What every figure has in common: names, colours, markers, and how arrays become curves and maps."""
