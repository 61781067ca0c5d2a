r"""Graded pairs worked by hand, by kind: a gold answer, right answers, and after `!!` wrong ones."""

# ruff: noqa: E501 - one line for each gold answer

HAND = {
    "numbers": r"""
5 | 5 | 5.0 | 5. | +5 | 05 | $5$ | \(5\) | \boxed{5} | {5} | (5) | \text{5} !! 6 | -5 | 5.0001 | 50 | 0.5 | 55
-5 | -5 | −5 | - 5 !! 5
0 | 0 | -0 | 0.00 !! 1
0.5 | .5 | 1/2 | \frac12 | \frac{1}{2} | \dfrac{1}{2} | \tfrac{1}{2} | \cfrac{1}{2} | \frac{2}{4} | \frac{-1}{-2} | ½ | 2^{-1} | 0.50 !! 0.51 | 5 | 50 | \frac{1}{3}
\frac{1}{3} | 1/3 | 0.\overline{3} !! 0.333 | 0.3333333333
\frac{1}{6} | 0.1\overline{6} !! 0.\overline{16}
\frac{7}{3} | 2\frac{1}{3} | 2\dfrac13 | 2 1/3 | 2 + 1/3 !! 21/3 | 2 \cdot \frac{1}{3}
-\frac{7}{3} | -2\frac{1}{3} | -\frac{7}{3} | \frac{-7}{3} | \frac{7}{-3} !! -\frac53
\frac{3}{4} | \frac{\frac{3}{2}}{2} | 3/2/2 !! 3/(2/2)
1234567 | 1,234,567 | 1{,}234{,}567 | 1\,234\,567 | 1 234 567 !! 1,234,568
1,234.5 | 1234.5 | 1234.50
1500 | 1.5 \times 10^3 | 1.5\cdot10^{3} | 1.5e3 | 1.5E+3 | 1.5 × 10^3 !! 1.5 \times 10^4
0.0015 | 1.5\times 10^{-3} | 1.5e-3
1024 | 2^{10} | 2^10 | 4^5 | 2**10 !! 2^{11}
512 | 2^{3^2} | 2^3^2
64 | (2^3)^2 !! 2^{3^2}
120 | 5! | 5!+0 | 6!/6 | \binom{10}{3} | \dbinom{10}{7} !! 4! | \binom{10}{4}
7 | |{-7}| | |-7| | \lvert -7 \rvert
3 | \lfloor \pi \rfloor | \lfloor 3 \rfloor !! \lceil \pi \rceil
4 | \lceil \pi \rceil
10^{100} | 10^{100} | 10^{99}\cdot 10 !! 10^{100}+1
2^{100000} | 2^{100000} | 4^{50000} !! 2^{100001}
2 !! 2+10^{-400} | 2+10^{-60}\pi
\frac{10}{3} | 2\frac{5}{3}
""",
    "constants": r"""
\sqrt{2} | \sqrt2 | sqrt(2) | 2^{1/2} | 2^{\frac{1}{2}} | 2^{0.5} | \frac{2}{\sqrt{2}} | √2 !! 1.41421356 | 1.41421356237309504880168872420969807856967187537694 | \sqrt{3} | -\sqrt{2}
\sqrt{12} | 2\sqrt{3} !! 3\sqrt{2}
\frac{1}{\sqrt{3}} | \frac{\sqrt{3}}{3} | \frac{\sqrt3}3
1+\sqrt{2} | \sqrt{2}+1 | \sqrt{3+2\sqrt{2}} | \frac{1}{\sqrt{2}-1} !! 1-\sqrt{2}
\sqrt{2}\sqrt{3} | \sqrt{6}
\sqrt[3]{8} | 2
\sqrt[3]{-8} | -2
\sqrt[3]{2} | 2^{1/3} !! \sqrt[4]{2}
\sqrt{16} | 4
\sqrt{\frac{9}{4}} | 1.5
\pi | \pi | π | pi !! 3.14 | \frac{22}{7} | 3.14159265358979323846
2\pi | 2 \pi | \pi\cdot 2 | \pi+\pi !! \pi^2
\frac{\pi}{6} | \pi/6 | \frac16\pi | \frac\pi6 | \arcsin\frac12 | \arctan \frac{1}{\sqrt{3}} !! \frac{\pi}{3}
36\pi | 36π !! 113.1
e^2 | e^{2} | e \cdot e | \exp(2) !! 7.389
\ln 2 | \ln(2) | -\ln\frac12 | \frac{\ln 4}{2} !! \ln 3
\log_2 8 | 3
\log_{2} 8 | 3
\log_2 3 | \frac{\ln 3}{\ln 2} | \frac{\log 3}{\log 2} !! \log_3 2
\log 2 | \log 2
\sin 30^\circ | \frac{1}{2}
\sin 30^{\circ} | 0.5
\cos\frac{\pi}{3} | \frac12
\cos 60° | 0.5
\tan 45^\circ | 1 !! 2
\cot 45^\circ | 1
\sec 60^\circ | 2
\csc 30^\circ | 2
\arccos 0 | \frac{\pi}{2}
\sin^{-1} 1 | \frac{\pi}{2}
\sin^2 1 + \cos^2 1 | 1
\cosh 1 | \frac{e+e^{-1}}{2}
\tanh 0 | 0
3+4i | 4i+3 | 3 + 4 i !! 3-4i | 4+3i
i^2 | -1
\frac{1}{i} | -i
(1+i)^2 | 2i
|3+4i| | 5
\sqrt{-4} | 2i
e^{i\pi} | -1
e^{i\pi/2} | i
\infty | \infty | +\infty | ∞ !! -\infty | 5
-\infty | -\infty
5 !! \infty | \frac{1}{0} | 5+\frac{0}{0} | \ln(-1)
""",
    "expressions": r"""
x | x !! y
2x | x\cdot 2 | x+x | 2*x !! 3x
x^2 | x*x | x^{2} | x² !! 2x
x+1 | 1+x | x-(-1) !! x + 2
x-1 !! 1-x
(x+1)^2 | x^2+2x+1 !! x^2+1
(x+1)(x-1) | x^2-1 | (x-1)(x+1) !! x^2+1
x^3-y^3 | (x-y)(x^2+xy+y^2) !! (x-y)^3
\frac{x}{2} | 0.5x | x/2 | \frac{1}{2}x !! \frac{2}{x}
\frac{2x}{3} | 2\frac{x}{3}
\frac{1}{x}+\frac{1}{y} | \frac{x+y}{xy}
\frac{x^2-1}{x-1} | x+1
\sqrt{x^3} | x\sqrt{x}
\sqrt{x} | x^{1/2}
\sqrt{x^2} | |x|
2^{x+1} | 2\cdot 2^x !! 2^x+1
\ln(xy) | \ln x+\ln y
\sin^2 x + \cos^2 x | 1
\sin 2x | 2\sin x\cos x !! 2\sin x
\tan x | \frac{\sin x}{\cos x}
e^{x+y} | e^x e^y
e^{x}+C | C+e^x
n! | n\cdot(n-1)!
\frac{n(n+1)}{2} | \binom{n+1}{2}
a_1+a_2 | a_2+a_1 | a_{1}+a_{2} !! a_1+a_3
\alpha\beta | \beta\alpha !! \alpha+\beta
(-1)^{n+1} | -(-1)^n
x=5 | 5 | x = 5 !! x=6
5 | x=5 | 5=x | x = 2+3 = 5
y=2x+1 | 2x+1 | y-2x=1 | 2y=4x+2 | 2x-y+1=0 !! y=2x-1
2x+1 | y=2x+1 | f(x)=2x+1
x^2+y^2=1 | y^2+x^2-1=0 !! x^2+y^2=2 | 1
y=\sqrt{x} | y-\sqrt{x}=0
y=\ln x | 2\ln x-2y=0 !! \ln x+y=0
x \neq 3 | x \ne 3
x+y<3 | y+x<3 | 3 > x+y !! x+y>3 | x+y\le 3
""",
    "forms": r"""
\{1\pm\sqrt{5},-2\} | \{-2, 1+\sqrt5, 1-\sqrt5\} !! \{-2, 1+\sqrt5\} | \{1\pm\sqrt{5}, 2\}
\pm 2, 3 | 3, 2, -2 | -2, 2, 3 !! 2, 3
(1,2) | (1, 2) | \left(1,2\right) | (1.0, \frac{4}{2}) | (x,y)=(1,2) | ]1,2[ !! (2,1) | (1,3) | [1,2] | (1,2,3)
(100,200) | (100, 200) !! 100200
[1,2] | [1,2] !! [1,2)
[1,2) | [1, 2[
(-\infty,3) | (-∞, 3) | x<3 !! (-\infty,3]
(-\infty,3] | x \le 3
(3,\infty) | x > 3 | 3 < x
(1,3] | 1 < x \leq 3 | 3 \ge x > 1 !! 1 \le x \leq 3
x \in (1,2) | (1,2)
[0,1] | x\in[0,1]
(-\infty,1)\cup(2,\infty) | (2,\infty)\cup(-\infty,1) | (-\infty,1)∪(2,∞) !! (-\infty,1]\cup(2,\infty) | (-\infty,1)
\{1,2,3\} | \{3,2,1\} | \left\{ 1, 2, 3 \right\} | {1,2,3} | 1,2,3 | \{1,2,2,3\} !! \{1,2\} | \{1,2,4\}
\{100,200,300\} | \{300,200,100\}
\{\sqrt{2},1\} | \{1,2^{1/2}\}
\emptyset | \varnothing | \{\} | \text{no solution}
1,2 | 2,1 | 1 and 2 | 1 \text{ and } 2 | 1, 2 | x=1, x=2 | x=1 \text{ or } x=2 !! 1,3 | 1 | 1,2,3
1,-2,3 | 3, 1, \text{and } -2 | 3, 1 \text{ and } -2
100, 200 | 100,200
\pm 2 | 2,-2 | -2, 2 !! 2
x=\pm 2 | \pm 2
1\pm\sqrt{2} | 1+\sqrt{2}, 1-\sqrt{2} | 1-\sqrt2, 1+\sqrt2 !! 1+\sqrt{2}
\pm 1\mp 2 | 1,-1 !! 3,-3
1,\sqrt{2} | \sqrt{2},1 !! \sqrt{2},1,3 | 1,1
x=2,y=3 | y=3,x=2 !! x=3,y=2
\begin{pmatrix}1&2\\3&4\end{pmatrix} | \begin{bmatrix} 1 & 2 \\ 3 & 4 \end{bmatrix} | \begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix} !! \begin{pmatrix}1&3\\2&4\end{pmatrix}
\begin{pmatrix}1\\2\end{pmatrix} | \begin{pmatrix}1\\2\end{pmatrix} | \begin{array}{c}1\\2\end{array} !! \begin{pmatrix}1&2\end{pmatrix}
3:4 | \frac{3}{4} | 6:8 !! 4:3
\mathbb{R} | (-\infty,\infty)
\text{all real numbers} | \mathbb{R}
""",
    "marks": r"""
5 | 5 \text{ cm} | 5\text{cm} | 5 cm | 5 \mathrm{~cm} | 5\text{ apples} | \$5 | \$5.00 | 5 \text{ dollars} | \text{Area} = 5 \text{ cm}^2 !! 6\text{ cm}
5\text{ cm} | 5 | 5\text{ centimeters} !! 5 \text{ m}
5\text{ cm}^2 | 5\text{ square centimeters} | 5\text{ cm}^{2} !! 5\text{ cm}
5\text{ m/s} | 5\text{ meters per second}
5\text{ apples} !! 6\text{ pears}
12 | 12 \text{ square units}
36\pi | 36\pi\text{ cm}^3
\$5 | 5
18 | \$18
30^\circ | 30 !! 31
30 | 30^\circ | 30° | 30 \text{ degrees}
-30^\circ | -30
50\% | 50\% | 50% | 0.5 | \frac{1}{2} | 50 | 50 \text{ percent} !! 5 | 5000
0.5 | 50\%
50 | 50\% !! 0.5
1011_2 | 1011_2 | 1011_{2} | 1011_{\text{two}} | 1011 !! 1010_2 | 1011_3
A3_{16} | A3_{16} !! A4_{16}
\approx 3.14 | 3.14 | \pi | 3.1416 !! 3.15
x \approx 3.14 | 3.14159
3.14 | \approx 3.14 !! 3.14159
\pi | \pi \approx 3.14
\text{Area} = 5 | 5
""",
    "words": r"""
A | A | (A) | \text{A} | \textbf{(A)} | A. | A) | (A) 12 | A: 12 | \textbf{(A)}\ 12 !! B | (B) 12 | \text{B}
\text{(C)} | C !! D
C !! 12
\text{yes} | Yes | yes. !! no
\text{Tuesday} | tuesday !! \text{Monday} | 5
5 !! Tuesday
\text{an even function} | \text{even function}
\text{no real solutions} | \text{No real solutions.}
""",
    "garbage": r"""
5 !! ) | 5) | (5 | 5 + | * 5 | 5 5 | 5 = < 5 | \frac{5} | \frac{}{} | ^^^ | ____ | {{{{ | import os | 五 | at least 5
\int x dx | \int x dx
""",
    "sets and intervals in words": r"""
(-\infty,1)\cup(2,\infty) | x < 1 \text{ or } x > 2 | x<1 or x>2 | x \in (-\infty, 1) \cup (2, \infty) !! x<1 \text{ and } x>2 | x \le 1 \text{ or } x > 2 | x > 1 \text{ or } x < 2
[0,5) | 0 \le x < 5 | 0\leq x<5 | x \in [0,5) | \left[0, 5\right) !! 0 < x \le 5 | 0 \le x \le 5 | [0,5] | (0,5)
(-2,2) | -2 < x < 2 | \left(-2,2\right) | ( -2 , 2 ) | -2<y<2 !! -2 \le x \le 2 | x < 2 | (2,-2) | (-2,3)
[3,\infty) | x \ge 3 | x\geq 3 | 3 \le x | [3, +\infty) | \left[3, \infty\right) !! x > 3 | x \le 3 | (3,\infty) | [4,\infty)
\{1,2\} | 1 \text{ and } 2 | 1 \text{ or } 2 | x=1 \text{ or } x=2 | x = 1, 2 | \{2, 1\} !! 1 | \{1,3\} | 1 \text{ and } 3 | x=1 \text{ or } x=3
\{-3, 3\} | \pm 3 | x = \pm 3 | -3, 3 | 3 \text{ and } -3 | x = 3 \text{ or } x = -3 !! 3 | -3 | \pm 4 | 3 \text{ and } 3
\emptyset | \varnothing | \{\} | \text{no solution} !! \{0\} | 5 | \mathbb{R}
\mathbb{R} | (-\infty,\infty) | \text{all real numbers} | (-\infty, +\infty) !! (0,\infty) | \emptyset | [0,1]
(1,2)\cup(3,4) | (3,4)\cup(1,2) | 1<x<2 \text{ or } 3<x<4 | (1, 2) \cup (3, 4) !! (1,2) | (1,4) | (1,2]\cup(3,4) | (1,2)\cap(3,4)
[-1,1]\cup\{3\} | \{3\}\cup[-1,1] !! [-1,1] | (-1,1)\cup\{3\} | [-1,3]
1, 2, 3 | 1, 2, \text{ and } 3 | 1, 2, and 3 | 3, 2, 1 | \{1,2,3\} | 1,2,3 !! 1, 2 | 1, 2, 4 | 1, 2, \text{ and } 4 | 6
-1, \frac{1}{2} | \frac12, -1 | x=-1 \text{ or } x=\frac{1}{2} | \{-1, 0.5\} | -1 \text{ and } 1/2 !! 1, \frac12 | -1 | -1, 2
0, 1, \infty | \infty, 0, 1 !! 0, 1 | 0, 1, -\infty
x \neq 2 | x\ne 2 !! x = 2 | x \neq 3
(0,1) | x \in (0,1) | 0<x<1 | 1 > x > 0 !! x \in [0,1] | 0 < x \le 1
""",
    "units": r"""
12 \text{ cm} | 12 | 12\text{cm} | 12 cm | 12 \mathrm{~cm} | 12\ \text{cm} | 12\,\mathrm{cm} | 12.0 \text{ cm} !! 13 \text{ cm} | 12 \text{ km} | 120 \text{ cm} | 1.2
54 \text{ square units} | 54 | 54 square units | 54 \text{ units}^2 !! 45 | 54^2
9.8 \text{ m/s}^2 | 9.8 | 9.80 \text{ m/s}^2 | 9.8 \mathrm{~m} / \mathrm{s}^{2} !! 8.9 \text{ m/s}^2 | 98
36\pi \text{ cm}^3 | 36\pi | 36 \pi \mathrm{~cm}^{3} | 36\pi\text{ cubic centimeters} !! 36 | 36\pi^2 | 63\pi \text{ cm}^3
15 \text{ minutes} | 15 | 15 minutes | 15\text{ min} !! 51 minutes | 15.5
25^\circ | 25 | 25^{\circ} | 25 \text{ degrees} | 25° | \angle A = 25^\circ !! 52^\circ | 25.5 | 205^\circ
72 | 72 \text{ clips} | 72 \text{ total clips} | 72\text{ people} | 72 people | 72 \text{ mph} !! 27 \text{ clips} | 72.5 \text{ people} | 7 2
\frac{3}{4} \text{ hour} | \frac34 | 0.75 | 3/4 \text{ hours} | \frac{3}{4} !! \frac43 \text{ hour} | 34
8 | 8 \text{ hours} | 8\text{ hrs} | 8 \text{ inches} | 8 \mathrm{ft} | 8 \text{ ft}^2 !! 8^2 | 8\text{ dozen} + 1 | 80 \text{ hours}
2\sqrt{13} \text{ units} | 2\sqrt{13} | \sqrt{52} !! 2\sqrt{31} | 4\sqrt{13}
11:30 \text{ a.m.} | 11:30 a.m. | 11:30\text{ AM} !! 11:30 \text{ p.m.} | 10:30 \text{ a.m.} | 12:30
""",
    "percent and fractions": r"""
28\% | 28 pct | 28 percent | 28 percentage !! 29 pct
37.5\% | 0.375 | \frac{3}{8} | 37.5 \% | 37.50\% | 37.5\text{ percent} !! 3.75\% | 0.0375 | 375 | \frac{5}{8}
\frac{1}{8} | 12.5\% | 0.125 | 1/8 | \frac{2}{16} !! 125\% | 1.25\% | 8 | 0.12
0.05 | 5\% | \frac{1}{20} | 5.0\% | 1/20 !! 50\% | 0.5 | 0.5\% | \frac{1}{2}
150\% | 1.5 | \frac{3}{2} | 1\frac12 | 150 \% !! 15\% | 0.15 | 15
\frac{2}{3} | 66\frac{2}{3}\% | 0.\overline{6} | 2/3 | \frac{4}{6} !! 0.67 | 66\% | 0.66 | \frac{3}{2} | 66.7\%
0.2 | \frac{1}{5} | 20\% | .2 | \frac15 !! 2\% | 0.02 | 2 | 0.25
1.25 | 1\frac{1}{4} | \frac{5}{4} | 125\% | 1 1/4 !! 1.2 | 12.5 | \frac{4}{5} | 1\frac{1}{5}
""",
    "chains and names": r"""
5 | x=5 | x = 5 | x=2+3=5 | 2+3=5 | f(3)=5 | \text{Area}=5 | y = 5 | n = 5 | = 5 | a_1 = 5 !! 3=5 | 5=3 | x=6 | x=5=6 | 5 = 6 | 3 + 5 | x > 5 | x \ne 5
\frac{3}{2} | x=\frac{3}{2} | x = \frac{6}{4} = \frac{3}{2} | \tan\theta = \frac32 | \frac{3}{2}=1.5 | P(A)=\frac{3}{2} !! x=\frac{2}{3} | \frac{3}{2}=\frac{2}{3} | 1 = \frac32
10 | a+b=10 | a + b = 3 + 7 = 10 | S_4 = 10 | |AB| = 10 | AB = 10 | \angle B = 10 !! 10_2 | 10_3 | 10_{2} | 1=10 | 9 = 10 | a+b=11
2\sqrt{3} | x = 2\sqrt{3} | \sqrt{12} = 2\sqrt{3} | BC=2\sqrt{3} | 2 \sqrt 3 !! x = 3\sqrt{2} | \sqrt{6} | 2 = \sqrt{3}
x^2+1 | f(x)=x^2+1 | y = x^2+1 | g(x) = 1 + x^2 !! f(x) = x^2-1 | x^2 | f(x)=x+1
y=x^2 | x^2 | y = x^2 | f(x)=x^2 | x^2=y !! y=x^3 | y=-x^2 | x = y^2
32349 | 32,349 | 32{,}349 | 32 349 | x=32349 !! 32, 349 | 32; 349 | (32, 349) | 32.349 | 32 \text{ and } 349 | 3, 2349
1234 | 1,234 | 1\,234 | 1234.00 !! 1, 234 | 12, 34 | 1;234 | 12,34
""",
    "equations": r"""
x < 1 | -x > -1 | 2x < 2 | 1 > x | x - 1 < 0 !! -x < -1 | x > -1 | 2x < 1 | x \le 1
x + y \ge 2 | y \ge 2 - x | -x - y \le -2 !! y \le 2 - x | x - y \ge 2
x+2y=4 | 2y+x=4 | x + 2y - 4 = 0 | 4 = x+2y | 2x+4y=8 | x = 4-2y | y = 2 - \frac{x}{2} !! x+2y=5 | x-2y=4 | 2x+y=4 | x+2y+4=0 | 4
x^2+y^2=25 | y^2+x^2=25 | x^2+y^2-25=0 | 25 = x^2 + y^2 !! x^2+y^2=5 | x^2-y^2=25 | x^2+y^2+25=0 | 25
\frac{x^2}{9}+\frac{y^2}{4}=1 | 4x^2+9y^2=36 | \frac{y^2}{4}+\frac{x^2}{9}=1 !! \frac{x^2}{4}+\frac{y^2}{9}=1 | 9x^2+4y^2=36 | \frac{x^2}{9}-\frac{y^2}{4}=1
y=-\frac{1}{2}x+3 | x+2y=6 | y = 3 - \frac{x}{2} | y = -0.5x + 3 | 2y = -x+6 !! y=\frac12x+3 | x+2y=3 | y=-2x+3
(x-1)^2+(y+2)^2=9 | (y+2)^2+(x-1)^2=9 | x^2+y^2-2x+4y-4=0 !! (x+1)^2+(y-2)^2=9 | (x-1)^2+(y+2)^2=3 | x^2+y^2-2x+4y+4=0
2x-3y+1=0 | 3y-2x=1 | y = \frac{2x+1}{3} | 2x + 1 = 3y !! 2x+3y+1=0 | 2x-3y=1 | 3x-2y+1=0
""",
    "matrices and vectors": r"""
\begin{pmatrix} 1 \\ -2 \\ 3 \end{pmatrix} | \begin{bmatrix}1\\-2\\3\end{bmatrix} | \begin{pmatrix}1\\-2\\\frac{6}{2}\end{pmatrix} !! \begin{pmatrix} 1 \\ 2 \\ 3 \end{pmatrix} | \begin{pmatrix} 1 & -2 & 3 \end{pmatrix} | \begin{pmatrix} 3 \\ -2 \\ 1 \end{pmatrix}
\begin{pmatrix} \frac{1}{2} & 0 \\ 0 & 1 \end{pmatrix} | \begin{pmatrix} 0.5 & 0 \\ 0 & 1 \end{pmatrix} | \begin{bmatrix} 1/2 & 0 \\ 0 & 1 \end{bmatrix} | \left[\begin{array}{cc} \frac12 & 0 \\ 0 & 1 \end{array}\right] !! \begin{pmatrix} 2 & 0 \\ 0 & 1 \end{pmatrix} | \begin{pmatrix} \frac{1}{2} & 0 \\ 1 & 0 \end{pmatrix} | \frac12
\begin{bmatrix} 0 & -1 \\ 1 & 0 \end{bmatrix} | \begin{pmatrix} 0 & -1 \\ 1 & 0 \end{pmatrix} | \begin{bmatrix}0&-1\\1&0\end{bmatrix} !! \begin{bmatrix} 0 & 1 \\ -1 & 0 \end{bmatrix} | \begin{bmatrix} 0 & -1 & 0 \\ 1 & 0 & 0 \end{bmatrix} | 0
\begin{pmatrix} \sqrt{2} & 1 \\ 1 & \pi \end{pmatrix} | \begin{bmatrix} \sqrt{2} & 1 \\ 1 & \pi \end{bmatrix} | \begin{pmatrix} \frac{2}{\sqrt{2}} & 1 \\ 1 & \pi \end{pmatrix} !! \begin{pmatrix} 2 & 1 \\ 1 & \pi \end{pmatrix} | \begin{pmatrix} \sqrt{2} & 1 \\ 1 & 3.14 \end{pmatrix}
""",
    "wrappers": r"""
7 | \text{7} | \mathrm{7} | \mathbf{7} | \textbf{7} | \boxed{7} | \left(7\right) | {7} | \displaystyle 7 | \$7\$ | $7$ | \(7\) | \[7\] | \fbox{7} | **7** | \textbf{7.} | \large 7 !! \text{8} | \mathrm{77} | -\text{7} | \sqrt{7} | \overline{7}3
\frac{5}{9} | \displaystyle\frac{5}{9} | \text{$\frac{5}{9}$} | \dfrac59 | {5}/{9} | \frac 5 9 | \frac{5}{9}. | \cfrac{5}{9} | 5 / 9 | 5 \div 9 !! \frac{9}{5} | \frac{5}{90} | 59 | 5.9 | -\frac{5}{9}
\text{June 20} | June 20 | \text{june 20} | \text{June }20 !! \text{June 21} | \text{July 20} | 20
\text{(E)} | E | (E) | \text{E} | \mathbf{(E)} | \textbf{(E) } 12 !! \text{(D)} | D | 5 | \text{(A)}
\text{Navin} | Navin | \textbf{Navin} | navin !! \text{Nadia} | Nav | 9
\text{ellipse} | ellipse | \text{an ellipse} | \text{Ellipse.} !! \text{circle} | \text{hyperbola}
""",
    "points": r"""
(3, \frac{\pi}{2}) | \left( 3, \frac{\pi}{2} \right) | (3,\pi/2) | \left(3, \dfrac{\pi}{2}\right) | (r,\theta)=\left(3,\frac{\pi}{2}\right) !! \left(\frac{\pi}{2},3\right) | (3, \pi) | (3, -\frac{\pi}{2}) | 3, 2
\left( \frac{3}{2}, -13 \right) | (1.5,-13) | (3/2, -13) | \left(\frac{3}{2},-13\right) !! \left(-13, \frac{3}{2}\right) | (1.5, 13) | (\frac{2}{3},-13)
(6,31,-1) | ( 6 , 31 , -1 ) | (6, 31, -1) | (x,y,z)=(6,31,-1) | \left(6,31,-1\right) !! (6,31,1) | (31,6,-1) | (6,31) | (6,31,-1,0)
(1,2),(3,4) | (3,4),(1,2) | (1, 2), (3, 4) | (1,2) \text{ and } (3,4) | \{(1,2),(3,4)\} !! (1,2),(4,3) | (1,2) | (1,2,3,4) | (2,1),(3,4)
(-1,2) | (x,y) = (-1,2) | (-1, 2.0) | \left(-1,\,2\right) !! (1,2) | (-1,-2) | (2,-1) | [-1,2]
""",
    "roots, powers, logarithms": r"""
\frac{\sqrt{3}}{2} | \frac{1}{2}\sqrt{3} | \sqrt{\frac{3}{4}} | \sqrt{3}/2 | \frac{3}{2\sqrt{3}} | \sin 60^\circ | 0.5\sqrt{3} !! \frac{\sqrt{2}}{2} | \frac{3}{2} | 0.866 | \frac{2}{\sqrt{3}} | \sqrt{\frac{3}{2}}
2^{10} | 1024 | 4^5 | 32^2 !! 2^{11} | 20 | 10^2 | 1023
3\sqrt[3]{2} | \sqrt[3]{54} | 3 \cdot 2^{1/3} | 3\cdot2^{\frac13} !! 3\sqrt{2} | \sqrt[3]{6} | 6
\frac{1+\sqrt{5}}{2} | \frac12+\frac{\sqrt5}{2} | 0.5(1+\sqrt{5}) | \frac{\sqrt{5}+1}{2} | \frac{2}{\sqrt{5}-1} !! \frac{1-\sqrt{5}}{2} | 1.618 | \frac{1+\sqrt{3}}{2} | \frac{\sqrt{5}}{2}+1
\log_2 3 | \frac{\ln 3}{\ln 2} | \frac{\log_{10} 3}{\log_{10} 2} | \log_{2}(3) | \log_4 9 !! \log_3 2 | \log_2 4 | 1.58 | \ln 3
\ln 2 | \ln(2) | \log_e 2 | -\ln \frac12 | \frac12\ln 4 !! \ln 3 | 0.693 | 2 | \log_{10} 2
e^2 | e^{2} | \exp(2) | e\cdot e !! 2e | e^{-2} | 7.39 | e^3
\sqrt{5} | 5^{1/2} | \sqrt 5 | \sqrt{5.0} | \frac{5}{\sqrt5} !! 5 | \sqrt{6} | 2.236 | -\sqrt{5} | \sqrt[3]{5}
\frac{\sqrt{2}+\sqrt{6}}{4} | \frac{\sqrt{6}+\sqrt{2}}{4} | \cos 15^\circ | \frac14(\sqrt2+\sqrt6) !! \frac{\sqrt{6}-\sqrt{2}}{4} | \frac{\sqrt{8}}{4} | \frac{\sqrt{2}+\sqrt{6}}{2}
120 | 5! | \binom{10}{3} | 5 \cdot 4 \cdot 3 \cdot 2 | 6!/6 !! 4! | \binom{10}{2} | 5 | 12
\binom{8}{3} | 56 | \frac{8!}{3!5!} | \dbinom{8}{5} !! \binom{8}{4} | 336 | \binom{3}{8}
""",
    "algebra": r"""
x^2-5x+6 | (x-2)(x-3) | 6-5x+x^2 | x^{2} - 5x + 6 | (x-3)(x-2) !! (x+2)(x+3) | x^2+5x+6 | x^2-5x-6 | (x-1)(x-6)
\frac{x+1}{x-1} | \frac{1+x}{x-1} | 1+\frac{2}{x-1} | -\frac{x+1}{1-x} | (x+1)/(x-1) !! \frac{x-1}{x+1} | \frac{x+1}{1-x} | x+1/x-1
\frac{n(n+1)}{2} | \frac{n^2+n}{2} | \frac12 n(n+1) | \frac{n}{2}(n+1) !! \frac{n(n-1)}{2} | n(n+1) | \frac{n^2+1}{2}
3ab^2 | 3b^2a | 3 a b^{2} | a\cdot 3b^2 !! 3a^2b | 3ab | 9ab^2 | 3a+b^2
-\sin x | -\sin(x) | \sin(-x) !! \sin x | -\cos x | \sin^{-1} x
2\sin x\cos x | \sin 2x | \sin(2x) | 2\cos x \sin x !! 2\sin x | \cos 2x | \sin x \cos x
e^{2x} | (e^x)^2 | e^{x}e^{x} | \exp(2x) !! e^{x^2} | 2e^x | e^{2}x
4x^3-12x^2 | 4x^2(x-3) | -12x^2+4x^3 | 4x^{3}-12x^{2} !! 4x^3+12x^2 | 4x^2(x+3) | -8x^5
(a+b)^2 | a^2+2ab+b^2 | (b+a)^2 | (a+b)(a+b) !! a^2+b^2 | (a-b)^2 | 2a+2b | a+b^2
\frac{a}{b} | a/b | a b^{-1} | \dfrac{a}{b} !! \frac{b}{a} | ab | a-b
x-y | -y+x | -(y-x) !! y-x | x+y | xy
\frac{1}{x} | x^{-1} | 1/x !! x | -x | \frac{1}{x^2} | \frac{x}{1}+1
5x | 5 x | 5\cdot x | x\cdot 5 | 2x+3x !! 5+x | 5 | x^5 | 6x | 5y
k | k !! -k | 2k | m
""",
    "decimals": r"""
0.333 | .333 | 0.3330 | \frac{333}{1000} !! \frac13 | 0.33 | 0.3333 | 333
3.14 | 3.140 | \frac{157}{50} !! \pi | 3.14159 | 3.1 | 314
0.1\overline{6} | \frac16 | 1/6 !! 0.16 | 0.17 | \frac{1}{7} | 0.\overline{16}
2.50 | 2.5 | \frac{5}{2} | 2\frac12 | 5/2 | \$2.50 !! 25 | 2.05 | 2.51 | \frac{2}{5}
0.00125 | 1.25\times 10^{-3} | 1.25e-3 | \frac{1}{800} | 1.25 \cdot 10^{-3} !! 1.25\times 10^{3} | 0.0125 | 1.25\times10^{-4}
6.02\times 10^{23} | 6.02e23 | 6.02 \cdot 10^{23} | 60.2\times 10^{22} !! 6.02\times 10^{22} | 6.02 | 6.03\times 10^{23}
-0.75 | -\frac34 | -.75 | \frac{-3}{4} | -75\% | −0.75 !! 0.75 | -\frac43 | -7.5
1{,}000{,}000 | 1000000 | 10^6 | 1,000,000 | 10^{6} !! 100000 | 1,000 | 10^7 | 1, 000, 000
""",
    "not an answer": r"""
5 | 5 !! \text{five hundred} | | 5 5 | 5 + | (5 | \frac{5}{} | import os | 5; 6 | 5 \text{ or } 6 | 5, 6 | [5, 6] | \text{I do not know} | 5^{5} | 5e3 | 5/2 | 55 | 5x | \sqrt{5} | 5\% + 1
\frac{1}{2} | \frac12 !! \frac{1}{2} \text{ or } 1 | 1/2/3 | \frac{1}{2}, 1 | \frac{1}{0} | 12 | 1, 2 | 2
x+1 | 1+x !! x+1=0 | x + | \text{x plus two} | x1
(1,2) | (1, 2) !! (1,2 | 12 | 1.2 | (1,2),(3,4) | \emptyset
""",
    "long answers": r"""
x_{1}=2, x_{2}=-3 | 2, -3 | x_1 = 2, x_2 = -3 | x=2 \text{ or } x=-3 | x_{1}=-3, x_{2}=2 | \{-3, 2\} | x_1=2,\quad x_2=-3 !! x_{1}=2, x_{2}=3 | 2 | x_1=-2, x_2=3 | 2, 3
x_{1,2} = \frac{1 \pm \sqrt{5}}{2} | \frac{1+\sqrt{5}}{2}, \frac{1-\sqrt{5}}{2} | x = \frac{1\pm\sqrt5}{2} | \frac{1 \pm \sqrt{5}}{2} !! \frac{1+\sqrt{5}}{2} | \frac{-1 \pm \sqrt{5}}{2} | \frac{1 \pm \sqrt{3}}{2}
(2,3),(3,2) | (3,2),(2,3) | (2, 3), (3, 2) | (2,3) \text{ and } (3,2) | (x,y)=(2,3),(3,2) | \{(2,3),(3,2)\} | (2,3); (3,2) !! (2,3) | (2,3),(2,3) | (3,3),(2,2)
(x,y)=(1,2) | (1,2) | x=1, y=2 | x = 1,\ y = 2 | (1, 2) !! (2,1) | x=2, y=1 | (1,3) | x = 1
x=1,y=2,z=3 | x = 1, y = 2, z = 3 | x=1, \quad y=2, \quad z=3 | z=3, x=1, y=2 !! x=1,y=3,z=2 | x=1, y=2 | x=3, y=2, z=1
-\frac{1}{2} < x < 3 | \left(-\frac{1}{2}, 3\right) | x \in \left(-\frac12, 3\right) | -0.5<x<3 !! \left[-\frac{1}{2}, 3\right] | -\frac12 \le x < 3 | \left(\frac12, 3\right)
x < -1 \text{ or } x > 4 | (-\infty,-1)\cup(4,\infty) | x>4 \text{ or } x<-1 | x \in (-\infty,-1) \cup (4, +\infty) | x<-1, x>4 !! -1<x<4 | (-\infty,-1]\cup[4,\infty) | x > 4 | x>-1 \text{ or } x<4
\left[-\frac{3}{2},\frac{3}{2}\right] | [-1.5,1.5] | -\frac32 \le x \le \frac32 | \left[ -\dfrac{3}{2} , \dfrac{3}{2} \right] !! \left(-\frac{3}{2},\frac{3}{2}\right) | [-3,2] | \frac32
k \ge 2 | [2,\infty) | k\geq2 | 2 \le k | k \in [2, \infty) !! k>2 | k \le 2 | k \ge -2 | 2
a > \frac{1}{4} | a>0.25 | \left(\frac14, \infty\right) | \frac{1}{4} < a !! a \ge \frac14 | a < \frac14 | a > 4
\frac{\pi}{4}+k\pi | k\pi+\frac{\pi}{4} | \frac{\pi}{4} + \pi k | \frac{(4k+1)\pi}{4} !! \frac{\pi}{4}+2k\pi | -\frac{\pi}{4}+k\pi | \frac{\pi}{4}
2n+1 | 1+2n | 2 n + 1 | 2(n+1)-1 !! 2n-1 | n+1 | 2n | 2k
\frac{3}{5}, \frac{4}{5} | \frac45, \frac35 | 0.6, 0.8 | \frac{3}{5} \text{ and } \frac{4}{5} !! \frac35 | \frac{3}{4}, \frac{4}{5} | \frac{7}{5}
10\sqrt{2}-10 | 10(\sqrt{2}-1) | -10+10\sqrt{2} | \frac{10}{\sqrt2+1} !! 10\sqrt{2}+10 | 10-10\sqrt{2} | 4.14
\frac{5\sqrt{3}}{3} | \frac{5}{\sqrt{3}} | \frac{5}{3}\sqrt{3} | 5\sqrt{3}/3 | \sqrt{\frac{25}{3}} !! \frac{3\sqrt5}{5} | \frac{5\sqrt3}{2} | 5
\frac{27\sqrt{3}}{4} \text{ cm}^2 | \frac{27\sqrt{3}}{4} | 6.75\sqrt{3} | \frac{27}{4}\sqrt{3}\mathrm{~cm}^{2} !! \frac{27\sqrt{2}}{4} | 11.69 | \frac{27\sqrt{3}}{2}
11,\! 111,\! 100 | 11111100 | 11,111,100 | 11{,}111{,}100 !! 1111110 | 11, 111, 100 | 11111101
\$32,\!348 | 32348 | \$32,348 | 32{,}348 \text{ dollars} | \$32348.00 !! \$32,349 | \$3,234.8 | 32,348\%
2516_8 | 2516_{8} | 2516 | 2516_{\text{eight}} !! 2516_9 | 2517_8 | 256_8
AB5_{12} | AB5_{12} !! AB6_{12} | BA5_{12} | AB5_{16}
\text{two} | \text{two} | two !! \text{three} | \text{twenty}
\text{Yes} | yes | \text{yes} | \text{Yes.} !! no | \text{No}
\text{Wednesday} | Wednesday | \textbf{Wednesday} !! \text{Thursday} | \text{Wed, Thu}
\text{B, E} | \text{B,E} | B, E | \text{B and E} !! \text{B} | \text{B, D} | \text{A, E}
A, C | A,C | \text{A, C} | A \text{ and } C | C, A !! A | A, B | B, C
x^{4}+1 | 1+x^4 | x^4 + 1 !! x^4-1 | x^3+1 | (x+1)^4
2x^3-3x+5 | 5-3x+2x^3 | 2x^{3} - 3x + 5 | x(2x^2-3)+5 !! 2x^3+3x+5 | 2x^3-3x | 2x^2-3x+5
(3x+4)(x-10) | (x-10)(3x+4) | 3x^2-26x-40 !! (3x-4)(x+10) | 3x^2+26x-40 | (3x+4)(x-1)
\frac{x^2+3x+2}{x+1} | x+2 | \frac{(x+1)(x+2)}{x+1} !! x+1 | x-2 | \frac{x+2}{x+1}
p^2-pq+q^2 | q^2-pq+p^2 | p^{2}+q^{2}-pq | (p+q)^2-3pq !! p^2+pq+q^2 | (p-q)^2 | p^2-q^2
\frac{1}{2}e^{2x}+C | \frac{e^{2x}}{2}+C | C+0.5e^{2x} !! e^{2x}+C | \frac12 e^{x}+C | 2e^{2x}+C
y=2x-1 | 2x-y=1 | 2x-y-1=0 | y+1=2x | y = -1+2x !! y=2x+1 | x-2y=1 | y=-2x-1
3x+4y-12=0 | 3x+4y=12 | y=-\frac34x+3 | \frac{x}{4}+\frac{y}{3}=1 | 6x+8y=24 !! 3x-4y-12=0 | 4x+3y-12=0 | 3x+4y+12=0
y^2=8x | x=\frac{y^2}{8} | 8x=y^2 | y^2-8x=0 !! x^2=8y | y^2=-8x | y=8x | y^2=4x
r=4\sin\theta | r = 4 \sin \theta | 4\sin\theta=r !! r=4\cos\theta | r=\sin\theta | r=4
\sqrt{a^2+b^2} | \sqrt{b^2+a^2} | (a^2+b^2)^{1/2} | (a^2+b^2)^{\frac{1}{2}} !! a+b | \sqrt{a^2-b^2} | a^2+b^2
\cos\theta | \cos(\theta) | \cos \theta !! \sin\theta | -\cos\theta | \cos 2\theta
\arctan 2 | \arctan(2) | \tan^{-1} 2 | \tan^{-1}(2) !! \tan 2 | \arctan 3 | \arctan\frac12
1-\ln 2 | -\ln 2+1 | 1+\ln\frac12 | \ln\frac{e}{2} !! 1+\ln 2 | \ln 2 | 1-\ln 3
-i\sqrt{3} | -\sqrt{3}i | -\sqrt3 i !! i\sqrt{3} | \sqrt{3} | -3i
\frac{1}{2}+\frac{\sqrt{3}}{2}i | \frac{1+\sqrt{3}i}{2} | \frac{1+i\sqrt{3}}{2} | 0.5+\frac{\sqrt3}{2}i !! \frac{1}{2}-\frac{\sqrt{3}}{2}i | \frac{\sqrt{3}}{2}+\frac12 i | \frac12
2+3i, 2-3i | 2-3i, 2+3i | 2 \pm 3i | x = 2 \pm 3i !! 2+3i | 3 \pm 2i | 2 \pm 3
\frac{3}{13} \approx 0.23 | \frac{3}{13} | 3/13 !! \frac{13}{3} | 0.3 | \frac{3}{14}
7 \text{ and } -7 | \pm 7 | 7, -7 | -7 \text{ and } 7 | x = 7 \text{ or } x = -7 !! 7 | 49 | \pm 8
\left\{ \frac{1}{3}, 2 \right\} | \frac13, 2 | x=\frac{1}{3} \text{ or } x=2 | \{2, 1/3\} | 2 \text{ and } \frac13 !! 2 | \left\{ \frac{1}{3}, 3 \right\} | 3, 2
1:2:3 | 1 : 2 : 3 !! 1:3:2 | 1:2 | 1:2:4
\frac{4}{3}\pi r^3 | \frac{4\pi r^3}{3} | \frac43 \pi r^{3} !! \frac{3}{4}\pi r^3 | 4\pi r^2 | \frac{4}{3}\pi r^2
2^{n}-1 | -1+2^n | 2^n - 1 !! 2^{n-1} | 2^n+1 | 2n-1
n^2+n | n(n+1) | n+n^2 !! n^2-n | n^2+1 | 2n^3
\frac{a^2b}{c} | a^2bc^{-1} | \frac{ba^2}{c} | a^2b/c !! \frac{ab^2}{c} | \frac{a^2c}{b} | a^2b
""",
    "calculus and sums": r"""
5 | \int_0^5 dx | \int_{0}^{5} 1 \, dx | \sum_{k=1}^{5} 1 !! \int_0^4 dx | \sum_{k=1}^{4} 1 | \int_0^5 x \, dx
\frac{1}{3} | \int_0^1 x^2 \, dx | \int_{0}^{1} x^{2} dx !! \int_0^1 x \, dx | \int_0^1 x^3 dx
1 | \lim_{x \to 0} \frac{\sin x}{x} | \int_0^1 2x \, dx | \max(0,1) !! \lim_{x \to 0} \frac{\sin 2x}{x} | \max(2,1)
24 | \prod_{k=1}^{4} k | \sum_{k=1}^{2} 12 !! \prod_{k=1}^{3} k | \sum_{k=1}^{4} k
55 | \sum_{k=1}^{10} k | \sum_{i=1}^{10} i !! \sum_{k=1}^{9} k | \sum_{k=1}^{10} k^2
\int x \, dx | \int x \, dx !! 5 | \int y^3 \, dy
\sum_{k=1}^{3} k^2 | 14 | 1+4+9 !! 15 | 13 | \sum_{k=1}^{3} k
x \equiv 3 \pmod{7} | x \equiv 3 \pmod 7 | x\equiv 3 \pmod{7} !! x \equiv 4 \pmod{7} | x \equiv 3 \pmod{8} | 5
6 | \gcd(12,18) | \min(6,7) !! \gcd(12,16) | \min(5,6)
""",
}
