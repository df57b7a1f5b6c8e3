"""cmoe inside other libraries; nothing in cmoe imports from here."""
