"""What nobody needs any more: found, and believed when it was found twice."""
