"""The engine inside other programs' frameworks. A module imports the framework that it is named for; nothing else does."""
