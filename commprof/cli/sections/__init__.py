"""Parts of the output of several verbs."""
