"""What the server does with a round: draw, weigh, add noise, step."""
