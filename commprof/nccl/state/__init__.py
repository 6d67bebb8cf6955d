"""What a log means as it goes by: communicators, their ranks, calls of groups, choices of algorithms."""
