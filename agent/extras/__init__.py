"""Optional parts of Carver, each a folder: nothing below imports one."""
