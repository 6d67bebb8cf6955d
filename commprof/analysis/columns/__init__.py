"""The columns of every answer, and how answers become frames, CSV and text."""
