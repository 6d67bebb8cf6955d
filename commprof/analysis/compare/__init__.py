"""Settings side by side: how runs differ, what each cost, and the advice."""
