"""How tokens reach the ranks that hold their experts."""
