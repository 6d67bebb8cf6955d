"""Export: writes tables to files for other tools and for papers."""
