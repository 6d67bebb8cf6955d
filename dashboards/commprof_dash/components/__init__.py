"""Components that pages share: cards, controls, tables, notices."""
