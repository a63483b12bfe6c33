"""Word lists of the synthetic text. Lower-case nouns are single tokens of the tokenizer.

The order of the lists is part of the data: it decides which text a seed gives.
"""


def _words(text: str) -> list[str]:
    return text.split()


NOUNS = _words("""
amber stone river lake forest meadow castle tower bridge garden window door mirror candle lantern basket
barrel bottle bucket button ribbon thread needle hammer anvil ladder rope chain wheel wagon saddle bridle
harbor anchor sail mast oar canal island beach shell pearl coral whale shark dolphin turtle frog lizard snake
spider beetle ant bee wasp moth butterfly robin sparrow eagle hawk owl raven crow swan goose duck rooster hen
goat sheep lamb horse donkey mule camel lion tiger bear wolf fox badger otter beaver rabbit hare squirrel
mouse rat cat dog pony deer moose oak pine birch maple willow cedar elm ash rose lily tulip daisy violet
clover fern moss grass wheat barley corn rice bean pea carrot onion garlic pepper tomato potato apple pear
plum peach cherry grape lemon orange melon olive fig date almond walnut honey sugar salt bread butter cheese
milk cream tea coffee soup stew cake pie cookie silver gold copper iron bronze steel tin lead glass paper
leather wool cotton silk linen velvet marble granite clay sand gravel brick tile slate chalk coal flame smoke
cloud rain snow hail storm thunder wind breeze frost ice dawn dusk noon night star moon sun comet planet
valley hill mountain cliff cave canyon desert plain swamp marsh pond spring stream ocean tide wave shore drum
flute harp violin trumpet horn bell piano guitar whistle pencil crayon brush canvas ink stamp coin ring crown
sword shield arrow bow spear
""")
"""Names of things: keys of facts and stations of chains."""

UNSEEN = _words("""
zebra walrus pelican iguana ostrich cobra panther gazelle jasmine orchid thistle juniper cactus bamboo turnip
radish spinach pumpkin mango papaya cinnamon vanilla ginger mustard compass telescope umbrella teapot saucer
pillow blanket cushion curtain chimney balcony cellar attic pantry fountain statue
""")
"""Real words that no training text contains."""

PEOPLE = _words("""
Mia Tom Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Lucy Max Nina Oscar Paula Quinn Rosa Sam
Tina Victor Wendy Zoe Adam Bella Carl Dora Ella Frank Gina Hugo Iris James Karl Laura Mark Nora
""")

CITIES = _words("""
Paris London Berlin Madrid Rome Vienna Oslo Dublin Lisbon Athens Cairo Delhi Tokyo Lima Boston Denver Dallas
Geneva Milan Prague
""")

COLOURS = _words("red blue green yellow white black brown purple pink gray")

ITEMS = _words("""
apples pears books pens stamps coins cards marbles shells stickers cookies candles buttons beads bottles
balloons flowers eggs pencils tickets plates cups stones bricks toys
""")

BOXES = _words("boxes bags baskets trays crates jars packs shelves")

ADJECTIVES = _words("old young tall small quiet bright heavy gentle clever tired happy cold warm empty narrow wide")

VERBS = _words("walked waited sang worked rested played slept talked danced read")

PLACES = _words("market station school library church museum kitchen office farm park")

ONSETS = _words("b d f g h k l m n p r s t v w z br dr gr kr pl st tr sl")
VOWELS = _words("a e i o u")
CODAS = ["", "", "", "n", "r", "l", "m", "s", "k", "t"]
