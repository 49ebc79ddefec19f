"""What every operation needs: settings, requests, errors, volume groups and what is on them."""
