"""How tokens are chosen: parameters, processed logits, grammars."""
