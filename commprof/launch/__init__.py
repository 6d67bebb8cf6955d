"""Starting programs under the recorder."""
