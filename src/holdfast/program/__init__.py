"""How definitions become commands: given these outcomes, what does the program ask for next?"""
