"""The columns of answers, and answers as frames, CSV and text."""
