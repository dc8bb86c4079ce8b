"""Images and prompts in, numbers out. Imports none of our other packages."""
