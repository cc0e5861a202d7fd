"""Words that questions are made of. Written for this recipe; under the licence of the project."""

TOPICS = (
    """
photosynthesis|plate tectonics|inflation|the water cycle|black holes|vaccines|supply and demand|the French Revolution
compound interest|the Roman Empire|natural selection|electric motors|the immune system|climate change|music theory
chess openings|the Silk Road|probability|prime numbers|the printing press|sourdough bread|solar panels|machine learning
public key cryptography|the Renaissance|coral reefs|rainbows|thunderstorms|the stock market|democracy|human rights
the periodic table|nuclear fusion|gravity|magnetism|DNA|antibiotics|the nervous system|sleep|meditation|haiku
impressionism|jazz|the Industrial Revolution|the Cold War|the moon landing|tides|glaciers|volcanoes|earthquakes
fermentation|composting|beekeeping|crop rotation|urban planning|public transport|bicycles|bridges|concrete|steel
semiconductors|operating systems|databases|version control|unit testing|recursion|sorting algorithms|hash tables
neural networks|compilers|garbage collection|caching|load balancing|the internet|email|HTTP|DNS|encryption|passwords
open source software|agile development|code review|technical debt|microservices|containers|regular expressions
functional programming|object-oriented programming|concurrency|floating point numbers|binary search|graph theory
linear algebra|calculus|statistics|the scientific method|ethics|stoicism|existentialism|logic|rhetoric|negotiation
leadership|time management|budgeting|insurance|taxes|mortgages|startups|marketing|supply chains|accounting
first aid|nutrition|running|yoga|swimming|mountaineering|photography|watercolour painting|pottery|knitting|gardening
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

NOUNS = (
    """
lighthouse keeper|clockmaker|astronaut|librarian|fox|dragon|robot|baker|sailor|violinist|gardener|detective|painter
shepherd|ghost|tailor|beekeeper|teacher|inventor|blacksmith|pilot|mermaid|wizard|farmer|postman|cat|crow|whale|wolf
old photograph|broken compass|red umbrella|silver key|wooden box|forgotten letter|music box|empty notebook|lost map
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

PLACES = (
    """
a small village by the sea|a city that never sleeps|an abandoned railway station|the edge of a desert|a space station
a mountain monastery|a rainy harbour town|an old library|a forest in winter|a market in the year 2150|an island
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

AUDIENCES = (
    "a ten-year-old",
    "a curious beginner",
    "a university student",
    "an expert in another field",
    "my grandmother",
)

ACTIVITIES = (
    """
learning a new language|writing a novel|preparing for a job interview|running a first marathon|saving money
keeping houseplants alive|giving a talk|reading more books|cooking for a large family|working from home|moving house
learning to code|planning a long journey|studying for exams|making friends in a new city|debugging a program
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

MATTERS = (
    """
a delayed delivery|a change of the meeting's date|a request for a reference|a broken heating system|a salary review
an invitation to a workshop|a mistake in an invoice|feedback on a draft|a day off|a lost parcel|a new project
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

PEOPLE = ("a colleague", "my manager", "a customer", "my landlord", "a supplier", "a professor", "the support team")

LANGUAGES = ("Python", "Python", "Python", "JavaScript", "TypeScript", "Java", "C++", "C", "Go", "Rust", "SQL", "Bash")

TASKS = (
    """
reverses a linked list|counts the words in a text file|checks whether a string is a palindrome|merges two sorted lists
finds the longest common prefix of some strings|computes the n-th Fibonacci number|implements a stack with two queues
parses a CSV file and sums a column|validates an email address|converts Roman numerals to integers|finds all anagrams
generates a random password|implements binary search|rotates a matrix by ninety degrees|groups records by a key
flattens a nested list|removes duplicates while keeping the order|computes a moving average|finds the median of a stream
reads a JSON file and prints its keys|renames all files of a folder|downloads a page and extracts its links
implements an LRU cache|implements a priority queue|solves the Tower of Hanoi|checks balanced brackets
finds the shortest path in a grid|detects a cycle in a graph|sorts with merge sort|sorts with quicksort
counts inversions in a list|computes the greatest common divisor|tests whether a number is prime|prints a calendar
simulates a bank account|implements a rate limiter|retries a call with exponential backoff|logs to a rotating file
converts temperatures|formats a duration in words|computes the edit distance of two strings|implements a trie
transposes a matrix|finds the two numbers that add up to a target|evaluates an arithmetic expression
draws a progress bar|serves a small REST API|joins two tables and counts rows|selects the newest row of each group
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

GOODS = ("apples", "pencils", "tickets", "bricks", "eggs", "books", "candles", "bottles", "chairs", "stamps")
