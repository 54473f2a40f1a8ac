"""What a server's owner is told of its requests: log lines, and files with the requests themselves."""
