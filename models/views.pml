/* SPDX-License-Identifier: Apache-2.0 */
/* Change of views, a model for spin 6.5: how the members of a view make the next one.
 *
 * The protocol, with the rules that it needs
 * A view is a set of processes (seat and incarnation: here a process number) named by (round, coordinator process).
 * A member that calls a change sends agree (attempt, its views, its greatest round) to a coordinator. Its views are the
 * one it last installed and its doubts: all that it was ready for since. The coordinator, which itself has installed
 * a view (1), decides: those whose agree it has must be a majority of each of these views (2, 3). It names a view by a
 * round above all reported and all it ever named itself (1) and sends commit with each one's attempt; a commit of an
 * attempt that was left is void (1). A commit binds nobody. Who takes it writes the name into its control block, serves
 * in no older view, has a doubt, and then sends ready, leavers included (2). The coordinator is ready at any moment
 * between commit and the last ready. With all ready the view is established: done goes to all, and who takes done
 * within its attempt installs and serves, or leaves. Whoever misses its deadline returns an error and keeps its doubts.
 * Majority (2): of the members of the old view, by process, without those that are proven to have ended before any
 * newer view: more than half, or half with the lowest seat. Proof (3): first the end is seen, then the block of
 * that process shows no newer view; the block is read by a member of that view in its node, or came with a goodbye.
 *
 * What is abstracted
 * Late, stopped and woken: any process may take no step while the deadlines of others pass, so no variable is needed.
 * A lost connection is a message that is lost (LOSS), or never taken before the deadline of its receiver.
 * A crash needs no transition of its own in the middle: it is a deadline, unseen by others, then the end. Where all
 * seats are in one node the block proves as much as a goodbye, and only normal exits are tried.
 * A message that its receiver would not take is not stored. Every message is one step, every store to a block too.
 *
 * Properties
 * P1  No two views of one name and different sets for which anybody was ever ready (so none are installed).
 * P2  An operation of view v completes at p if, after its call, each other member of v has answered p while it serves
 *     in v; p serves in v from install until it is ready for another view or ends, whatever it could know. From
 *     the moment when a view is established no operation that is called in an older view completes, and none in a
 *     view that did not come from it. Asserted: (now) never two established views all of whose members serve in them;
 *     (ever) established views, in the order of their names, are a chain: somebody of each view was ready for the
 *     next one established. That one serves in no older view, so that view is over, also if all its members have ended.
 * P3  No invalid end state and no cycle (pan -l): every change ends. With CALM (no faults, no deadline): all install.
 * P4  Who serves in a view: all its members were ready for it, so their counters are zero and their old ends closed.
 * P5  (FENCE) No process of a node writes rows of an older view while a process of that node serves in a newer one.
 *
 * Fence (FENCE): before a process sends ready, it writes the new name into a word of each process of its node that is
 * left out (of any view that it installed or was ready for), and then waits until that one is not writing or has ended.
 * A writer announces that it writes, then looks at its word, then writes. A writer that is stopped in the middle
 * neither ends nor stops writing: the change ends at the deadline. Between nodes new keys do this.
 * Masks are local, and no rule reads them: so they are no variable. BROKEN 11 is also the coordinator that subtracts
 * whom it has masked. */
#ifndef N
#define N 3              /* members of the first view, seats 0..N-1 */
#endif
#ifndef NEW
#define NEW 0            /* 1: a newcomer, process N, takes a seat whose process has ended */
#endif
#ifndef CHANGES
#define CHANGES 2        /* commits in all */
#endif
#ifndef CALLS
#define CALLS 2          /* changes that each process calls */
#endif
#ifndef FAULTS
#define FAULTS 1         /* ends of processes, and lost messages with LOSS, in all */
#endif
#ifndef LOSS
#define LOSS 0
#endif
#ifndef ANY
#define ANY 0            /* 1: any member coordinates; 0: a lower seat than one's own or oneself */
#endif
#ifndef PERNODE
#define PERNODE 8        /* seats in the first of two nodes */
#endif
#ifndef K
#define K 1              /* messages that one connection holds (an assertion shows that it is enough) */
#endif
#ifndef WRITES
#define WRITES 1         /* FENCE: writes of all processes */
#endif
#ifndef BROKEN
#define BROKEN 0         /* the list is in scripts/check_models.sh */
#endif
#define P (N+NEW)
#define NV (1+CHANGES)
#define NONE NV
#define B(i) (1<<(i))
#define CH(a,b) to[(a)*P+(b)]
#define LATER(a,b) (rnd[a] > rnd[b] || (rnd[a] == rnd[b] && co[a] > co[b]))
#if P > 4
#define EACH(X) :: X(0) :: X(1) :: X(2) :: X(3) :: X(4)
#define CLEARALL(w) w[0] = 0; w[1] = 0; w[2] = 0; w[3] = 0; w[4] = 0
#define UNION(w) (w[0] | w[1] | w[2] | w[3] | w[4])
#elif P > 3
#define EACH(X) :: X(0) :: X(1) :: X(2) :: X(3)
#define CLEARALL(w) w[0] = 0; w[1] = 0; w[2] = 0; w[3] = 0
#define UNION(w) (w[0] | w[1] | w[2] | w[3])
#else
#define EACH(X) :: X(0) :: X(1) :: X(2)
#define CLEARALL(w) w[0] = 0; w[1] = 0; w[2] = 0
#define UNION(w) (w[0] | w[1] | w[2])
#endif
mtype = { agree, commit, ready, done };
chan ask[P*P] = [CALLS] of { mtype, byte, byte, byte };  /* agree: attempt, views, greatest round */
chan to[P*P] = [K] of { mtype, byte, byte };             /* commit: attempt, view; ready and done: 0, view */
byte nv = 1, rnd[NV], co[NV], set[NV], rdy[NV];  /* views: round, coordinator, members, who is to be ready */
byte est = 1, had = 1;                           /* views established; views that anybody was ready for */
byte serves[P], newest[P];                       /* view each serves in; its block: newest view it was ready for */
byte open[P], cur[P], att[P], gathers;           /* attempt that waits for commit, its view; attempts; coordinators */
byte seat[P], ended, bye, faults = FAULTS;
#ifdef FENCE
byte word[P], writing, writes = WRITES;          /* newest view that each is left out of; who writes */
#endif
hidden byte i, j, k, n, lo, in, t, ok;           /* of one d_step */
#if BROKEN == 14
byte snap[P*P];
#define BLOCK(q) snap[p*P+(q)]
#elif BROKEN == 7
#define BLOCK(q) newest[((NEW && (q) < N && seat[P-1] == (q)) -> P-1 : (q))]
#else
#define BLOCK(q) newest[q]
#endif
#define SAMENAME(a,b) (rnd[a] == rnd[b] && (BROKEN == 8 -> seat[co[a]] == seat[co[b]] : co[a] == co[b]))
#define NODE(q) (seat[q] < PERNODE -> B(PERNODE)-1 : 255-(B(PERNODE)-1))
#if BROKEN == 1
#define PROVEN(q,V) ((ended & B(q)) != 0)
#elif BROKEN == 11
#define PROVEN(q,V) (!(R & B(q)))
#else
#define PROVEN(q,V) ((ended & B(q)) && !LATER(BLOCK(q), V) && ((bye & B(q)) || (got & set[V] & NODE(q))))
#endif
#define VIEWS ((B(ins) & (B(NV)-1)) | (BROKEN == 2 -> 0 : dbt))
#define HALF (BROKEN == 13 -> 2*k >= n : 2*k > n || (2*k == n && in) || BROKEN == 19)

inline majority(R, C) {                     /* ok: R is a majority of every view of C */
  ok = (C != 0); i = 0;
  do
  :: i < NV && (C & B(i)) ->
     n = 0; k = 0; lo = 255; in = 0; j = 0;
     do
     :: j < P ->
        if
        :: (set[i] & B(j)) && !PROVEN(j, i) ->
           n++; k = k + ((R & B(j)) -> 1 : 0);
           if :: seat[j] < lo -> lo = seat[j]; in = ((R & B(j)) -> 1 : 0) :: else fi
        :: else -> k = k + ((BROKEN == 10 && NEW && j == N && (R & B(j)) && !(set[i] & B(j))) -> 1 : 0)
        fi; j++
     :: else -> break
     od;
     if :: HALF :: else -> ok = 0 fi; i++
  :: i < NV && !(C & B(i)) -> i++
  :: else -> break
  od
}
inline p1(w) {
  i = 0;
  do :: i < NV -> assert(i == w || !(had & B(i)) || !SAMENAME(i, w) || set[i] == set[w]); i++ :: else -> break od
}
inline p2_now() {
  i = 0; n = 0;
  do
  :: i < NV ->
     k = ((est & B(i)) -> 1 : 0); j = 0;
     do :: j < P -> if :: (set[i] & B(j)) && serves[j] != i -> k = 0 :: else fi; j++ :: else -> break od;
     n = n + k; i++
  :: else -> break
  od;
  assert(n <= 1)
}
inline p2_ever(w) {                         /* lo, t: the established views before and after w by name */
  lo = NONE; t = NONE; i = 0;
  do
  :: i < NV ->
     if
     :: (est & B(i)) && i != w && LATER(w, i) -> if :: lo == NONE || LATER(i, lo) -> lo = i :: else fi
     :: (est & B(i)) && i != w && !LATER(w, i) -> if :: t == NONE || LATER(t, i) -> t = i :: else fi
     :: else
     fi; i++
  :: else -> break
  od;
  if :: lo != NONE -> assert(rdy[w] & set[lo]) :: else fi;
  if :: t != NONE -> assert(rdy[t] & set[w]) :: else fi
}
inline p4(w) {
  j = 0;
  do :: j < P -> assert(!(set[w] & B(j)) || newest[j] == w || LATER(newest[j], w) || BROKEN == 15); j++
     :: else -> break od
}

#ifdef FENCE
/* x: who is in a view of this process, in its node, and not in v. */
inline fence() {
  x = 0; i = 0;
  do
  :: i < NV -> x = x | (((BROKEN == 22 -> (ins == i) : (VIEWS & B(i)) != 0)) -> set[i] : 0); i++
  :: else -> break
  od;
  x = x & NODE(p) & ~set[v] & ~B(p) & ~ended; i = 0;
  do
  :: i < P -> if :: (x & B(i)) && LATER(v, word[i]) && BROKEN != 21 -> word[i] = v :: else fi; i++
  :: else -> break
  od;
  if :: BROKEN == 21 -> x = 0 :: else fi
}
inline p5() {
  j = 0;
  do
  :: j < P -> assert(j == p || !(NODE(p) & B(j)) || serves[j] == NONE || !LATER(serves[j], serves[p])); j++
  :: else -> break
  od; j = 0
}
#define STOPPED(q) ((writing & (q) & ~ended) == 0)
#endif

#define CLEAR m = 0; a = 0; d = 0; e = 0
inline leave() {                            /* the attempt ends, its connections are closed */
  c = 0; v = 0; x = 0; got = 0; top = 0; CLEARALL(at); CLEARALL(chk);
  open[p] = 0; cur[p] = NONE; gathers = gathers & ~B(p);
  do
  :: x < P -> do :: CH(x,p)?m,a,d :: empty(CH(x,p)) -> break od; x++
  :: else -> break
  od;
  x = 0; CLEAR
}
#define VOID(q,M,A,D) ((M == commit && open[q] != A && BROKEN != 9) || (M != commit && cur[q] != D))
inline send(q, M, A, D) {
  if
  :: VOID(q,M,A,D)
  :: !VOID(q,M,A,D) -> assert(nfull(CH(p,q))); CH(p,q)!M,A,D
  :: !VOID(q,M,A,D) && faults > 0 && LOSS -> faults--
  fi
}
inline doubt() { serves[p] = NONE; dbt = dbt | B(v); mx = (rnd[v] > mx -> rnd[v] : mx); had = had | B(v); p1(v) }
inline established() { est = est | B(v); p2_ever(v); x = rdy[v] & ~B(p) }
inline end(normally) { ended = ended | B(p); bye = bye | (normally -> B(p) : 0); serves[p] = NONE }
#ifdef CALM
#define DEADLINE(where) false
#define ENOUGH ((got | ended) == B(P)-1)
#else
#define DEADLINE(where) goto where
#define ENOUGH true
#endif
#define START(q) (NEW && q < N && (ended & B(q))) -> seat[P-1] = q
#define ASK(q) (p != q && (ANY || q < p || q == N) && !(ended & B(q)) && (att[q] < CALLS || (gathers & B(q)))) -> c = q
#define TAKE(q) atomic { ask[q*P+p]?m,a,d,e -> \
    d_step { got = got | B(q); chk[q] = d; at[q] = a; top = (e > top -> e : top); CLEAR } }
#define LESS(q) (p != q && (x & B(q))) -> x = x & ~B(q)
#define TELL(q) atomic { x & B(q) -> x = x & ~B(q); send(q, commit, at[q], v); if :: x == 0 -> goto Collect :: else fi }
#define COUNT(q) atomic { CH(q,p)?m,a,d -> if :: m == ready && d == v -> x = x & ~B(q) :: else fi; CLEAR; \
    if :: x == 0 -> d_step { established() }; goto Reply :: else fi }
#define REPLY(q) atomic { x & B(q) -> x = x & ~B(q); send(q, done, 0, v) }

proctype Member(byte p) {
  byte ins = 0, dbt = 0, mx = 1;            /* kept: last view installed, doubts, greatest round */
  byte c, v, x, got, top, at[P], chk[P];    /* of one attempt */
  byte a, d, e; mtype m;
#if NEW
  if :: p == N -> ins = NONE; goto end_absent :: else -> goto Idle fi;
end_absent:
  atomic { if EACH(START) fi };             /* a newcomer takes a seat */
#endif
Idle:                                       /* serves, or has returned an error */
  atomic { leave();
#if BROKEN == 6
    if :: ins != NONE && serves[p] != ins -> d_step { serves[p] = ins; p2_now() } :: else fi;
#endif
    if :: att[p] == CALLS || nv == NV -> ins = 0; dbt = 0; mx = 0; att[p] = CALLS :: else fi }
end_idle:
  if
  :: atomic { att[p] < CALLS && nv < NV -> att[p]++;             /* calls a change */
#if BROKEN == 14
       d_step { i = 0; do :: i < P -> snap[p*P+i] = newest[i]; i++ :: else -> break od };
#endif
#ifdef CALM
       c = CALM; if :: c == p -> goto Gather :: else fi;
#else
       if
       :: p != N || BROKEN == 8 || (BROKEN == 17 && dbt) || (ins != NONE && ins != 0) -> goto Gather
       EACH(ASK)
       :: else -> goto Idle
       fi;
#endif
       open[p] = att[p];
       if :: ask[p*P+c]!agree,att[p],VIEWS,mx :: faults > 0 && LOSS -> faults-- fi }
#ifdef FENCE
  :: atomic { writes > 0 && serves[p] != NONE -> writes--; writing = writing | B(p) };
     if                                     /* announced, then the word, then the rows */
     :: !LATER(word[p], serves[p]) || BROKEN == 23 -> d_step { p5() }
     :: else
     fi;
     atomic { writing = writing & ~B(p); goto Idle }
#endif
  :: atomic { faults > 0 -> d_step { faults--; end(1) }; goto Gone }   /* exits normally, or ends in its only node */
  :: atomic { faults > 0 && PERNODE < N -> d_step { faults--; end(0) }; goto Gone }  /* crashes */
  fi;
  do                                        /* a member waits for commit */
  :: atomic { CH(c,p)?m,a,d ->
       if
       :: m == commit && (a == att[p] || BROKEN == 9) -> v = d; open[p] = 0; cur[p] = v; CLEAR;
          if :: BROKEN == 3 -> ins = v; dbt = 0 :: else fi; break
       :: else -> CLEAR
       fi }
  :: DEADLINE(Idle)
  od;
  atomic { true; d_step { doubt(); newest[p] = (BROKEN == 15 -> newest[p] : v) } };
#if defined(FENCE) && BROKEN == 20
  if :: writing == 0 :: DEADLINE(Idle) fi; d_step { fence(); x = 0 };
#elif defined(FENCE)
  d_step { fence() }; if :: STOPPED(x) -> x = 0 :: DEADLINE(Idle) fi;
#endif
  if :: atomic { true; send(c, ready, 0, v) } :: DEADLINE(Idle) fi;
#if BROKEN == 15
  if :: newest[p] = v :: DEADLINE(Idle) fi;
#endif
  do                                        /* and for done */
  :: atomic { CH(c,p)?m,a,d -> if :: m == done && d == v -> CLEAR; goto Install :: else -> CLEAR fi }
  :: DEADLINE(Idle)
  od;

Gather:                                     /* the coordinator */
  atomic { got = B(p); chk[p] = VIEWS; top = mx; gathers = gathers | B(p) };
  do
  EACH(TAKE)
  :: nv < NV && ENOUGH -> break
  :: nv == NV -> goto Idle
  od;
  atomic {
    x = UNION(chk);
    d_step { majority(got, x); e = ok };
    if :: !e || nv == NV -> goto Idle :: else -> x = got; e = 0 fi;   /* refused */
#ifdef SHRINK
    do EACH(LESS) :: break od; true;        /* who is got and not in x leaves */
#endif
    d_step {
      if :: NEW && (x & B(N)) -> x = x & ~B(seat[P-1]) :: else fi;    /* a seat has one process */
#if BROKEN == 4
      e = UNION(chk); majority(x, e); assert(ok); e = 0;
#endif
      v = nv; nv++; cur[p] = v; gathers = gathers & ~B(p);
      rnd[v] = top+1; co[v] = p; set[v] = x; rdy[v] = got; mx = (BROKEN == 18 -> mx : top+1);
      x = (BROKEN == 16 -> got & x : got) & ~B(p) };
    if :: x == 0 -> goto Collect :: else fi };
  do EACH(TELL) :: DEADLINE(Burn) od;
Collect:
  atomic { got = 0; top = 0; CLEARALL(at); CLEARALL(chk);
    x = (BROKEN == 12 -> B(p) : (BROKEN == 16 -> rdy[v] & set[v] : rdy[v])) };
  do
  EACH(COUNT)
#ifdef FENCE
#if BROKEN == 20
  :: atomic { (x & B(p)) && !at[0] && writing == 0 -> at[0] = 2 }
#endif
  :: atomic { (x & B(p)) && at[0] == (BROKEN == 20 -> 2 : 0) ->
       d_step { newest[p] = v; doubt(); got = x; fence(); top = x; x = got; got = 0; at[0] = 1 } }
  :: atomic { (x & B(p)) && at[0] == 1 && (BROKEN == 20 || STOPPED(top)) -> x = x & ~B(p); at[0] = 0; top = 0;
#else
  :: atomic { x & B(p) -> d_step { newest[p] = v; doubt(); x = x & ~B(p) };
#endif
       if :: x == 0 -> d_step { established() }; goto Reply :: else fi }
  :: DEADLINE(Burn)
  od;
Reply:
  do EACH(REPLY) :: x == 0 -> goto Install :: DEADLINE(Burn) od;
Burn:
#if BROKEN == 5
  dbt = dbt & ~B(v);
#endif
  goto Idle;

Install:
  if
  :: set[v] & B(p) -> d_step { ins = v; dbt = 0; serves[p] = v; p4(v); p2_now() }; goto Idle
  :: else -> d_step { end(1) }              /* it leaves, and says goodbye */
  fi;
Gone:
  atomic { leave(); ins = 0; dbt = 0; mx = 0; att[p] = CALLS };
end_gone:
  false
}
init {
  d_step {
    rnd[0] = 1; set[0] = B(N)-1; rdy[0] = B(N)-1; i = 0;
    do :: i < P -> seat[i] = (i < N -> i : 255); serves[i] = (i < N -> 0 : NONE); cur[i] = NONE; i++
    :: else -> break od };
  byte z = 0;
  atomic { do :: z < P -> run Member(z); z++ :: else -> break od }
}
