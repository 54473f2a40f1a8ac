"""From sockets to text: the pipeline of processes, and one room for each protocol that its front doors speak."""
