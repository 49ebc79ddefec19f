"""What is done behind the answers: wipes, pools given back, pools and snapshots extended."""
