"""What the two processes say to each other: messages, and the arrays that come with them."""
