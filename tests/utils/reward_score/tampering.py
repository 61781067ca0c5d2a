"""Ways to pass a test without solving the problem. Each is a program that also defines `f`."""

ATTACKS = {
    "frame walk": """
import sys
frame, seen = sys._getframe(), []
while frame:
    names = {**frame.f_globals, **frame.f_locals}
    seen += [str(value) for value in names.values() if isinstance(value, (str, int))]
    frame = frame.f_back
print("\\n".join(seen))
def f(*a):
    frame = sys._getframe()
    while frame:
        for name, value in {**frame.f_globals, **frame.f_locals}.items():
            if "expect" in name or "output" in name:
                return value
        frame = frame.f_back
""",
    "every object in memory": """
import gc
found = [o for o in gc.get_objects() if isinstance(o, dict) and ("outputs" in o or "expected" in o)]
print(found)
def f(*a): return found
""",
    "equal to everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
    def __bool__(self): return True
    def __repr__(self): return "True"
print(Yes())
def f(*a): return Yes()
""",
    "a number equal to everything": """
class Yes(int):
    def __eq__(self, other): return True
    __hash__ = int.__hash__
print(Yes(1))
def f(*a): return Yes(1)
""",
    "a text equal to everything": """
class Yes(str):
    def __eq__(self, other): return True
    def split(self, *a): return self
    __hash__ = str.__hash__
print(Yes("1"))
def f(*a): return Yes("1")
""",
    "mock.ANY": """
from unittest.mock import ANY
print(ANY)
def f(*a): return ANY
""",
    "patched builtins": """
import builtins
class Yes:
    def __eq__(self, other): return True
for name in "abs all any bool len set sorted sum list isinstance type".split():
    setattr(builtins, name, lambda *a, **k: Yes())
def f(*a): return True
""",
    "patched json": """
import json
json.dumps = lambda *a, **k: '{"value": true}'
call = {"name": "f", "path": [], "arguments": ["tuple", []], "keywords": ["dict", []]}
json.loads = lambda *a, **k: call
json.JSONEncoder.encode = lambda *a: "true"
def f(*a): return True
""",
    "another json module": """
import sys, types
fake = types.ModuleType("json")
fake.dumps = lambda *a, **k: "true"
fake.loads = lambda *a, **k: 1
sys.modules["json"] = fake
def f(*a): return True
""",
    "every descriptor": """
import os
for number in range(64):
    for text in (b"success\\n", b'{"value": true}\\n', b'{"passed": true}\\n', b"True\\n"):
        try:
            os.write(number, text)
        except OSError:
            pass
def f(*a): return True
""",
    "answers before the questions": """
import os
for number in (1, 3, 4, 5, 6, 7, 8):
    try:
        os.write(number, b'{"value": ["handle", 0]}\\n' * 50)
    except OSError:
        pass
def f(*a): return f
""",
    "at exit": """
import atexit, os
atexit.register(lambda: (os.write(1, b"True"), os._exit(0)))
def f(*a): raise SystemExit(0)
""",
    "leave at once": "import os; os._exit(0)",
    "leave in the call": """
import os, sys
def f(*a): os._exit(0)
f()
""",
    "leave politely": """
import sys
def f(*a): sys.exit(0)
sys.exit(0)
""",
    "expected format": """
print("PASSED\\n1 passed in 0.01s\\n[True]\\nTrue\\nOK\\nRan 1 test\\nresults: [True] score: 1.0")
def f(*a): return "PASSED"
""",
    "its own source": """
import sys
print(open(sys.argv[0]).read())
def f(*a): return open(sys.argv[0]).read()
""",
    "tests by import": """
import glob, importlib, sys
for name in ("tests", "verl", "conftest", "solution", "test_cases", "judge", "__main__"):
    try:
        module = importlib.import_module(name)
    except ImportError:
        continue
    print(vars(module))
print([open(path).read() for path in glob.glob("/tmp/**/*.*", recursive=True)])
def f(*a): return [vars(m) for m in sys.modules.values() if "test" in m.__name__]
""",
    "other processes": """
import os
for number in (1, os.getppid()):
    for name in ("environ", "cmdline", "fd/0", "mem"):
        try:
            print(open(f"/proc/{number}/{name}", "rb").read())
        except OSError:
            pass
    try:
        os.kill(number, 9)
    except OSError:
        pass
def f(*a): return None
""",
    "no assertions": """
import os, sys
if __debug__:
    os.execv(sys.executable, [sys.executable, "-O", "-c", "print(True)"])
def f(*a): return True
""",
    "hooks": """
import sys, os
sys.excepthook = lambda *a: os._exit(0)
sys.settrace(lambda *a: None)
sys.displayhook = print
def f(*a): raise AssertionError
raise AssertionError
""",
    "a fault of the grader": """
def f(*a): raise SyntaxError("assertion")
raise ImportError
""",
    "an import error as the answer": """
def f(*a): raise ImportError("no module named test")
print(1)
""",
    "an error that is no answer": """
class Unsuitable(BaseException): pass
def f(*a): raise Unsuitable("an argument of the solution is not data")
""",
}
