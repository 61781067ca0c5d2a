r"""Answers with their verdicts, worked by hand: `gold | answer | verdict` in each line.

The verdict is `=` for Correct, `!` for Wrong and `?` for Abstain.
"""

NUMBERS = r"""
5 | 5 | =
5 | 5.0 | =
5 | 5. | =
5 | +5 | =
5 | 05 | =
5 | $5$ | =
5 | \(5\) | =
5 | \boxed{5} | =
5 | {5} | =
5 | (5) | =
5 | \text{5} | =
5 | 6 | !
5 | -5 | !
5 | 5.0001 | !
5 | 50 | !
5 | 0.5 | !
5 | 55 | !
-5 | -5 | =
-5 | −5 | =
-5 | - 5 | =
-5 | 5 | !
0 | 0 | =
0 | -0 | =
0 | 0.00 | =
0 | 1 | !
0.5 | .5 | =
0.5 | 1/2 | =
0.5 | \frac12 | =
0.5 | \frac{1}{2} | =
0.5 | \dfrac{1}{2} | =
0.5 | \tfrac{1}{2} | =
0.5 | \cfrac{1}{2} | =
0.5 | \frac{2}{4} | =
0.5 | \frac{-1}{-2} | =
0.5 | ½ | =
0.5 | 2^{-1} | =
0.5 | 0.50 | =
0.5 | 0.51 | !
0.5 | 5 | !
0.5 | 50 | !
0.5 | \frac{1}{3} | !
\frac{1}{3} | 1/3 | =
\frac{1}{3} | 0.\overline{3} | =
\frac{1}{3} | 0.333 | !
\frac{1}{3} | 0.3333333333 | !
\frac{1}{6} | 0.1\overline{6} | =
\frac{1}{6} | 0.\overline{16} | !
\frac{7}{3} | 2\frac{1}{3} | =
\frac{7}{3} | 2\dfrac13 | =
\frac{7}{3} | 2 1/3 | =
\frac{7}{3} | 2 + 1/3 | =
\frac{7}{3} | 21/3 | !
\frac{7}{3} | 2 \cdot \frac{1}{3} | !
-\frac{7}{3} | -2\frac{1}{3} | =
-\frac{7}{3} | -\frac{7}{3} | =
-\frac{7}{3} | \frac{-7}{3} | =
-\frac{7}{3} | \frac{7}{-3} | =
-\frac{7}{3} | -\frac53 | !
\frac{3}{4} | \frac{\frac{3}{2}}{2} | =
\frac{3}{4} | 3/2/2 | =
\frac{3}{4} | 3/(2/2) | !
1234567 | 1,234,567 | =
1234567 | 1{,}234{,}567 | =
1234567 | 1\,234\,567 | =
1234567 | 1 234 567 | =
1234567 | 1,234,568 | !
1,234.5 | 1234.5 | =
1,234.5 | 1234.50 | =
1500 | 1.5 \times 10^3 | =
1500 | 1.5\cdot10^{3} | =
1500 | 1.5e3 | =
1500 | 1.5E+3 | =
1500 | 1.5 × 10^3 | =
1500 | 1.5 \times 10^4 | !
0.0015 | 1.5\times 10^{-3} | =
0.0015 | 1.5e-3 | =
1024 | 2^{10} | =
1024 | 2^10 | =
1024 | 4^5 | =
1024 | 2**10 | =
1024 | 2^{11} | !
512 | 2^{3^2} | =
512 | 2^3^2 | =
64 | (2^3)^2 | =
64 | 2^{3^2} | !
120 | 5! | =
120 | 5!+0 | =
120 | 6!/6 | =
120 | 4! | !
120 | \binom{10}{3} | =
120 | \dbinom{10}{7} | =
120 | \binom{10}{4} | !
7 | |{-7}| | =
7 | |-7| | =
7 | \lvert -7 \rvert | =
3 | \lfloor \pi \rfloor | =
4 | \lceil \pi \rceil | =
3 | \lceil \pi \rceil | !
3 | \lfloor 3 \rfloor | =
10^{100} | 10^{100} | =
10^{100} | 10^{99}\cdot 10 | =
10^{100} | 10^{100}+1 | !
2^{100000} | 2^{100000} | =
2^{100000} | 4^{50000} | =
2^{100000} | 2^{100001} | !
2 | 2+10^{-400} | !
2 | 2+10^{-60}\pi | !
5 | 5+9^{9^9}-9^{9^9} | ?
6 | 5+9^{9^9}-9^{9^9} | ?
\frac{10}{3} | 2\frac{5}{3} | =
"""

SURDS_AND_CONSTANTS = r"""
\sqrt{2} | \sqrt2 | =
\sqrt{2} | sqrt(2) | =
\sqrt{2} | 2^{1/2} | =
\sqrt{2} | 2^{\frac{1}{2}} | =
\sqrt{2} | 2^{0.5} | =
\sqrt{2} | \frac{2}{\sqrt{2}} | =
\sqrt{2} | √2 | =
\sqrt{2} | 1.41421356 | !
\sqrt{2} | 1.41421356237309504880168872420969807856967187537694 | !
\sqrt{2} | \sqrt{3} | !
\sqrt{2} | -\sqrt{2} | !
\sqrt{12} | 2\sqrt{3} | =
\sqrt{12} | 3\sqrt{2} | !
\frac{1}{\sqrt{3}} | \frac{\sqrt{3}}{3} | =
\frac{1}{\sqrt{3}} | \frac{\sqrt3}3 | =
1+\sqrt{2} | \sqrt{2}+1 | =
1+\sqrt{2} | \sqrt{3+2\sqrt{2}} | =
1+\sqrt{2} | \frac{1}{\sqrt{2}-1} | =
1+\sqrt{2} | 1-\sqrt{2} | !
\sqrt{2}\sqrt{3} | \sqrt{6} | =
\sqrt[3]{8} | 2 | =
\sqrt[3]{-8} | -2 | =
\sqrt[3]{2} | 2^{1/3} | =
\sqrt[3]{2} | \sqrt[4]{2} | !
\sqrt{16} | 4 | =
\sqrt{\frac{9}{4}} | 1.5 | =
\pi | \pi | =
\pi | π | =
\pi | pi | =
\pi | 3.14 | !
\pi | \frac{22}{7} | !
\pi | 3.14159265358979323846 | !
2\pi | 2 \pi | =
2\pi | \pi\cdot 2 | =
2\pi | \pi+\pi | =
2\pi | \pi^2 | !
\frac{\pi}{6} | \pi/6 | =
\frac{\pi}{6} | \frac16\pi | =
\frac{\pi}{6} | \frac\pi6 | =
\frac{\pi}{6} | \arcsin\frac12 | =
\frac{\pi}{6} | \arctan \frac{1}{\sqrt{3}} | =
\frac{\pi}{6} | \frac{\pi}{3} | !
36\pi | 36π | =
36\pi | 113.1 | !
e^2 | e^{2} | =
e^2 | e \cdot e | =
e^2 | \exp(2) | =
e^2 | 7.389 | !
\ln 2 | \ln(2) | =
\ln 2 | -\ln\frac12 | =
\ln 2 | \frac{\ln 4}{2} | =
\ln 2 | \ln 3 | !
\log_2 8 | 3 | =
\log_{2} 8 | 3 | =
\log_2 3 | \frac{\ln 3}{\ln 2} | =
\log_2 3 | \frac{\log 3}{\log 2} | =
\log_2 3 | \log_3 2 | !
2 | \log 100 | ?
\log 2 | \log 2 | =
\log 2 | \ln 2 | ?
\sin 30^\circ | \frac{1}{2} | =
\sin 30^{\circ} | 0.5 | =
\cos\frac{\pi}{3} | \frac12 | =
\cos 60° | 0.5 | =
\tan 45^\circ | 1 | =
\tan 45^\circ | 2 | !
\cot 45^\circ | 1 | =
\sec 60^\circ | 2 | =
\csc 30^\circ | 2 | =
\arccos 0 | \frac{\pi}{2} | =
\sin^{-1} 1 | \frac{\pi}{2} | =
\sin^2 1 + \cos^2 1 | 1 | =
\cosh 1 | \frac{e+e^{-1}}{2} | =
\tanh 0 | 0 | =
3+4i | 4i+3 | =
3+4i | 3 + 4 i | =
3+4i | 3-4i | !
3+4i | 4+3i | !
i^2 | -1 | =
\frac{1}{i} | -i | =
(1+i)^2 | 2i | =
|3+4i| | 5 | =
\sqrt{-4} | 2i | =
e^{i\pi} | -1 | =
e^{i\pi/2} | i | =
\infty | \infty | =
\infty | +\infty | =
\infty | ∞ | =
\infty | -\infty | !
-\infty | -\infty | =
\infty | 5 | !
5 | \infty | !
5 | \frac{1}{0} | !
5 | 5+\frac{0}{0} | !
5 | \ln(-1) | !
"""

EXPRESSIONS = r"""
x | x | =
x | y | !
x | X | !
2x | x\cdot 2 | =
2x | x+x | =
2x | 2*x | =
2x | 3x | !
x^2 | x*x | =
x^2 | x^{2} | =
x^2 | x² | =
x^2 | 2x | !
x+1 | 1+x | =
x+1 | x-(-1) | =
x+1 | x + 2 | !
x-1 | 1-x | !
(x+1)^2 | x^2+2x+1 | =
(x+1)^2 | x^2+1 | !
(x+1)(x-1) | x^2-1 | =
(x+1)(x-1) | (x-1)(x+1) | =
(x+1)(x-1) | x^2+1 | !
x^3-y^3 | (x-y)(x^2+xy+y^2) | =
x^3-y^3 | (x-y)^3 | !
\frac{x}{2} | 0.5x | =
\frac{2x}{3} | 2\frac{x}{3} | =
\frac{x}{2} | x/2 | =
\frac{x}{2} | \frac{1}{2}x | =
\frac{x}{2} | \frac{2}{x} | !
\frac{1}{x}+\frac{1}{y} | \frac{x+y}{xy} | =
\frac{x^2-1}{x-1} | x+1 | =
\sqrt{x^3} | x\sqrt{x} | =
\sqrt{x} | x^{1/2} | =
\sqrt{x^2} | x | !
\sqrt{x^2} | |x| | =
2^{x+1} | 2\cdot 2^x | =
2^{x+1} | 2^x+1 | !
\ln(xy) | \ln x+\ln y | =
\sin^2 x + \cos^2 x | 1 | =
\sin 2x | 2\sin x\cos x | =
\sin 2x | 2\sin x | !
\tan x | \frac{\sin x}{\cos x} | =
e^{x+y} | e^x e^y | =
e^{x}+C | C+e^x | =
n! | n\cdot(n-1)! | =
\frac{n(n+1)}{2} | \binom{n+1}{2} | =
a_1+a_2 | a_2+a_1 | =
a_1+a_2 | a_{1}+a_{2} | =
a_1+a_2 | a_1+a_3 | !
\alpha\beta | \beta\alpha | =
\alpha\beta | \alpha+\beta | !
(-1)^{n+1} | -(-1)^n | =
x=5 | 5 | =
5 | x=5 | =
5 | 5=x | =
5 | x = 2+3 = 5 | =
x=5 | x = 5 | =
x=5 | x=6 | !
x=5 | y=5 | !
5 | a+b=5 | =
y=2x+1 | 2x+1 | =
2x+1 | y=2x+1 | =
2x+1 | f(x)=2x+1 | =
y=2x+1 | y-2x=1 | =
y=2x+1 | 2y=4x+2 | =
y=2x+1 | 2x-y+1=0 | =
y=2x+1 | y=2x-1 | !
x^2+y^2=1 | y^2+x^2-1=0 | =
x^2+y^2=1 | x^2+y^2=2 | !
x^2+y^2=1 | 1 | !
y=\sqrt{x} | y-\sqrt{x}=0 | =
y=\ln x | 2\ln x-2y=0 | =
y=\ln x | \ln x+y=0 | !
x \neq 3 | x \ne 3 | =
x+y<3 | y+x<3 | =
x+y<3 | 3 > x+y | =
x+y<3 | x+y>3 | !
x+y<3 | x+y\le 3 | !
"""

FORMS = r"""
(1,2) | (1, 2) | =
(1,2) | \left(1,2\right) | =
(1,2) | (1.0, \frac{4}{2}) | =
(1,2) | (2,1) | !
(1,2) | (1,3) | !
(1,2) | [1,2] | !
(1,2) | 1,2 | !
(1,2) | (1,2,3) | !
(1,2) | (x,y)=(1,2) | =
(100,200) | (100, 200) | =
(100,200) | 100200 | !
[1,2] | [1,2] | =
[1,2] | [1,2) | !
[1,2) | [1, 2[ | =
(1,2) | ]1,2[ | =
(-\infty,3) | (-∞, 3) | =
(-\infty,3) | (-\infty,3] | !
(-\infty,3) | x<3 | =
(-\infty,3] | x \le 3 | =
(3,\infty) | x > 3 | =
(3,\infty) | 3 < x | =
(1,3] | 1 < x \leq 3 | =
(1,3] | 3 \ge x > 1 | =
(1,3] | 1 \le x \leq 3 | !
x \in (1,2) | (1,2) | =
[0,1] | x\in[0,1] | =
(-\infty,1)\cup(2,\infty) | (2,\infty)\cup(-\infty,1) | =
(-\infty,1)\cup(2,\infty) | (-\infty,1)∪(2,∞) | =
(-\infty,1)\cup(2,\infty) | (-\infty,1]\cup(2,\infty) | !
(-\infty,1)\cup(2,\infty) | (-\infty,1) | !
(-\infty,1)\cup(2,\infty) | x<1 \text{ or } x>2 | ?
\{1,2,3\} | \{3,2,1\} | =
\{1,2,3\} | \left\{ 1, 2, 3 \right\} | =
\{1,2,3\} | {1,2,3} | =
\{1,2,3\} | 1,2,3 | =
\{1,2,3\} | \{1,2,2,3\} | =
\{1,2,3\} | \{1,2\} | !
\{1,2,3\} | \{1,2,4\} | !
\{1,2,3\} | (1,2,3) | !
\{100,200,300\} | \{300,200,100\} | =
\{\sqrt{2},1\} | \{1,2^{1/2}\} | =
\emptyset | \varnothing | =
\emptyset | \{\} | =
\emptyset | \text{no solution} | =
\emptyset | 0 | !
1,2 | 2,1 | =
1,2 | 1 and 2 | =
1,2 | 1 \text{ and } 2 | =
1,2 | 1, 2 | =
1,2 | x=1, x=2 | =
1,2 | x=1 \text{ or } x=2 | =
1,2 | 1,3 | !
1,2 | 1 | !
1,2 | 1,2,3 | !
1,1,2 | 1,2 | !
1,-2,3 | 3, 1, \text{and } -2 | =
1,-2,3 | 3, 1 \text{ and } -2 | =
100,200 | 200, 100 | =
100, 200 | 100,200 | =
\pm 2 | 2,-2 | =
\pm 2 | -2, 2 | =
\pm 2 | 2 | !
x=\pm 2 | \pm 2 | =
1\pm\sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2} | =
1\pm\sqrt{2} | 1-\sqrt2, 1+\sqrt2 | =
1\pm\sqrt{2} | 1+\sqrt{2} | !
\pm 1\mp 2 | 1,-1 | =
\pm 1\mp 2 | 3,-3 | !
1,\sqrt{2} | \sqrt{2},1 | =
1,\sqrt{2} | \sqrt{2},1,3 | !
1,\sqrt{2} | 1,1 | !
x=2,y=3 | y=3,x=2 | =
x=2,y=3 | x=3,y=2 | !
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} | =
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix} | =
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{pmatrix}1&3\\2&4\end{pmatrix} | !
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} | =
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1&2\end{pmatrix} | !
\begin{pmatrix}1\\2\end{pmatrix} | \begin{array}{c}1\\2\end{array} | =
3:4 | \frac{3}{4} | =
3:4 | 6:8 | =
3:4 | 4:3 | !
\mathbb{R} | (-\infty,\infty) | =
\text{all real numbers} | \mathbb{R} | =
"""

UNITS_PERCENT_BASE = r"""
5 | 5 \text{ cm} | =
5 | 5\text{cm} | =
5 | 5 cm | =
5 | 5 \mathrm{~cm} | =
5 | 5\text{ apples} | =
5 | 6\text{ cm} | !
5\text{ cm} | 5 | =
5\text{ cm} | 5\text{ centimeters} | =
5\text{ cm} | 5 \text{ m} | !
5\text{ cm} | 50 \text{ mm} | !
5\text{ cm}^2 | 5\text{ square centimeters} | =
5\text{ cm}^2 | 5\text{ cm}^{2} | =
5\text{ cm}^2 | 5\text{ cm} | !
5\text{ m/s} | 5\text{ meters per second} | =
5\text{ apples} | 5\text{ pears} | ?
5\text{ apples} | 6\text{ pears} | !
5\text{ cm/s} | 5\text{ cm/blink} | ?
12 | 12 \text{ square units} | =
36\pi | 36\pi\text{ cm}^3 | =
\$5 | 5 | =
5 | \$5 | =
5 | \$5.00 | =
5 | 5 \text{ dollars} | =
18 | \$18 | =
30^\circ | 30 | =
30 | 30^\circ | =
30 | 30° | =
30 | 30 \text{ degrees} | =
30^\circ | \frac{\pi}{6} | =
30^\circ | 31 | !
-30^\circ | -30 | =
50\% | 50\% | =
50\% | 50% | =
50\% | 0.5 | =
50\% | \frac{1}{2} | =
50\% | 50 | =
50\% | 50 \text{ percent} | =
50\% | 5 | !
50\% | 5000 | !
0.5 | 50\% | =
50 | 50\% | =
50 | 0.5 | !
50 | 5000\% | =
1011_2 | 1011_2 | =
1011_2 | 1011_{2} | =
1011_2 | 1011_{\text{two}} | =
1011_2 | 1011 | =
1011_2 | 1010_2 | !
1011_2 | 11 | !
1011_2 | 1011_3 | !
11 | 1011_2 | =
A3_{16} | A3_{16} | =
A3_{16} | A4_{16} | !
163 | A3_{16} | =
\approx 3.14 | 3.14 | =
\approx 3.14 | \pi | =
\approx 3.14 | 3.1416 | =
\approx 3.14 | 3.15 | !
x \approx 3.14 | 3.14159 | =
3.14 | \approx 3.14 | =
3.14 | 3.14159 | !
\pi | \pi \approx 3.14 | =
\text{Area} = 5 | 5 | =
5 | \text{Area} = 5 \text{ cm}^2 | =
"""

WORDS_AND_CHOICES = r"""
A | A | =
A | (A) | =
A | \text{A} | =
A | \textbf{(A)} | =
A | A. | =
A | A) | =
A | (A) 12 | =
A | A: 12 | =
A | \textbf{(A)}\ 12 | =
A | B | !
A | (B) 12 | !
A | \text{B} | !
\text{(C)} | C | =
\text{(C)} | D | !
C | 12 | !
\text{yes} | Yes | =
\text{yes} | yes. | =
\text{yes} | no | !
\text{Tuesday} | tuesday | =
\text{Tuesday} | \text{Monday} | !
\text{Tuesday} | 5 | !
5 | Tuesday | !
\text{an even function} | \text{even function} | =
\text{no real solutions} | \text{No real solutions.} | =
"""

GARBAGE = r"""
5 | | !
5 | ) | !
5 | 5) | !
5 | (5 | !
5 | 5 + | !
5 | * 5 | !
5 | 5 5 | !
5 | 5 = < 5 | !
5 | \frac{5} | !
5 | \frac{}{} | !
5 | ^^^ | !
5 | ____ | !
5 | {{{{ | !
5 | import os | !
5 | 五 | !
5 | \int_0^5 dx | ?
5 | \sum_{k=1}^5 1 | ?
5 | \unknown{5} | ?
5 | \begin{cases}5\end{cases} | ?
5 | 5!! | ?
5 | at least 5 | !
| 5 | ?
\int x dx | 5 | ?
\int x dx | \int x dx | =
"""

SECTIONS = (
    NUMBERS,
    SURDS_AND_CONSTANTS,
    EXPRESSIONS,
    FORMS,
    UNITS_PERCENT_BASE,
    WORDS_AND_CHOICES,
    GARBAGE,
)


def pairs() -> list[tuple[str, str, str]]:
    """(gold, answer, verdict). The first bar ends the gold answer and the last one the answer."""
    rows = []
    for section in SECTIONS:
        for line in section.strip("\n").splitlines():
            gold, _, rest = (" " + line).partition(" | ")
            answer, _, verdict = rest.rpartition("|")
            rows.append((gold.strip(" "), answer.strip(" "), verdict.strip()))
    return rows
