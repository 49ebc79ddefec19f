"""Optional parts of Carver (extras), one in each folder; no other part of Carver imports them."""
