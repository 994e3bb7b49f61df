/* SPDX-License-Identifier: Apache-2.0 */
/* High throughput between nodes, for rows whose receiver's tensors are plain: peers cannot write them (dispatch) or
 * read them (combine). A model for spin; docs/models.md says how to run it.
 *
 * Nodes {0, 1} and {2, 3}. The relay of rank s in the other node is s ^ 2. A rank is one stream: gate, work, gate, ...;
 * a gate waits for counters that only grow, work waits for no peer. Operations follow each other in every stream.
 *
 *   FORM 1 (A)   a plain rank is its own relay. A source puts one copy of a token to the relay of the node for all
 *                ranks there that are not plain, and one to each plain rank, of its own node too. A relay writes rows
 *                into tensors that can be written; a plain rank into its own. In combine a source asks likewise.
 *   FORM 2 (B)   one copy to the relay of the node. Relays and sources pass rows on to the inbox of a plain rank of
 *                their node. One agent polls: send, pass on, drain, in any order, and blocks on none.
 *   FORM 3 (C)   one copy to the relay of the node. Rows of plain ranks stay in its slot, which the
 *                node reads: turn k of every rank of the node takes round k - 1 there, and turn k + 1 gives the credit.
 *                All that gate k waits for was done in turns before k, by every rank of every node: W is 4 at least.
 *   FORM 0       the first draft: inboxes as in B, turns as in A. It deadlocks.
 *
 * A lane (source s, relay r) has W slots of one round of C rows. Dispatch and combine's requests share them.
 *
 *   dispatch   source: credits of round k - 1; put round k - 1 + W     relay, turn k: round k is there; place its rows,
 *                                                                      then the slot is free, then the credit
 *   combine    source, turn k: rows of round k - 1 are there; take     relay, turn k: request k is there; read it and
 *              them, then ask for round k - 1 + W                      its rows, put them back
 *
 * Properties: no invalid end state (everything ends); no slot is written before it was taken; every row is placed, and
 * returned, exactly once; what is taken belongs to the operation of its taker; tensors of a rank are read and written
 * in its own operation of that number alone, and plain ones by that rank alone.
 *
 * What is abstracted. A put is one step. A put that arrives later is like a receiver that is slower, since gates
 * wait for counters that only grow. A round is placed in one step, a token is one row, and so is its expert's
 * result. FORM 0 and 3 have dispatch alone. */
#ifndef FORM
#define FORM 1
#endif
#ifndef W
#define W 2              /* slots of a lane */
#endif
#ifndef C
#define C 1              /* rows of a round */
#endif
#ifndef T
#define T 3              /* tokens of a rank at most */
#endif
#ifndef TO0              /* destinations of the tokens of ranks 0 to 3, bits: node 0 to rank 3, node 1 to rank 0 */
#define TO0 8
#define TO1 8
#define TO2 1
#define TO3 1
#endif
#ifndef N0               /* tokens of ranks 0 to 3 */
#define N0 T
#define N1 T
#define N2 T
#define N3 T
#endif
#ifndef OPS
#define OPS 2            /* operations */
#endif
#ifndef SEQ
#define SEQ 10          /* bit h: operation h is a combine; else a dispatch */
#endif
#ifndef PLAIN
#define PLAIN 15         /* ranks whose tensors are plain; 16: any set, in combine the same or the others */
#endif
#ifndef BROKEN
#define BROKEN 0
#endif
#define B(i) (1 << (i))
#define RELAY(s) ((s) ^ 2)
#define MATE(s) ((s) ^ 1)
#define NODE(s) ((s) < 2 -> 3 : 12)
#define OTHER(s) ((s) < 2 -> 12 : 3)
#define OF(s, a, b, c, e) ((s) == 0 -> a : ((s) == 1 -> b : ((s) == 2 -> c : e)))
#define DEST(s) OF(s, TO0, TO1, TO2, TO3)
#define TOKENS(s) OF(s, N0, N1, N2, N3)
#define ROUNDS(s) ((TOKENS(s) + C - 1) / C)
#define TURNS ((T + C - 1) / C)
#define L(s, r) ((s) * 4 + (r))
#define SLOT(s, r, k) (L(s, r) * W + (k) % W)
#define VALUE(h, k) (1 + (h) * TURNS + (k))
#define COMBINE(h) ((SEQ >> (h)) & 1)
#define ROW(s, i) (1 << ((s) * T + (i)))
#define LAST(s, k) ((k) * C + C < TOKENS(s) -> (k) * C + C : TOKENS(s))

byte slot[16 * W], back[16 * W];     /* 0: free; else the operation and the round in it */
byte landed[16], credit[16];         /* dispatch: rounds put, rounds taken, of a lane, over all operations */
byte asked[16], returned[16];        /* combine: requests, returned rounds */
byte ready[4], data[4], shown[4], done[4]; /* signals in a node: the last operation */
byte now[4];                         /* operation whose tensors a rank has given, + 1 */
int rows[4];                         /* dispatch: rows placed at this rank; combine: rows that it got back */
byte box[4], ask[4], reply[4];      /* FORM 0, 2: inbox of one row; a request for a row, and the row: from the mate */
#if FORM == 3
byte steps[4], window[8];            /* turns that a rank has ended; its own rounds for a plain mate, two halves */
#endif
#if BROKEN == 4
byte many[4];                        /* rounds in the inbox of a rank */
#endif
hidden byte i, d, from;

#if FORM == 1
#define VIA(s, r, plain) (((r) != (s) -> DEST(s) & plain & B(r) : 0) | \
    ((r) == RELAY(s) -> DEST(s) & OTHER(s) & (BROKEN == 12 -> 15 : ~plain) : 0))
#else
#define VIA(s, r, plain) ((r) == RELAY(s) -> DEST(s) & OTHER(s) : 0)
#endif
#define ROUNDS_OF(s, r, plain) (VIA(s, r, plain) -> ROUNDS(s) : 0)
#define ALL(X) (X(0) && X(1) && X(2) && X(3))
#define ANY(X) (X(0) || X(1) || X(2) || X(3))

/* Rank p writes row i of s into the tensors of d. */
inline place(s, j) {
  assert(now[d] == h + 1 && (d == p || !(wplain & B(d))) && !(rows[d] & ROW(s, j)));
  rows[d] = rows[d] | ROW(s, j)
}
/* The rows of a round that go through this lane, to all of them. */
inline place_round(s, k) {
  i = (k) * C;
  do
  :: i < LAST(s, k) -> d = 0;
     do :: d < 4 -> if :: VIA(s, p, wplain) & B(d) -> place(s, i) :: else fi; d++ :: else -> break od; i++
  :: else -> break
  od; d = 0; i = 0
}
#define FILL(memory, s, r, k) assert(memory[SLOT(s, r, k)] == 0); memory[SLOT(s, r, k)] = VALUE(h, k)
#define CLEAR(memory, s, r, k) assert(memory[SLOT(s, r, k)] == VALUE(h, k)); memory[SLOT(s, r, k)] = 0

/* ---- What gates of rank p wait for, of each peer q ---- */
#define FREE(q) (credit[L(p,q)] >= landed[L(p,q)])
#define OLD(n, s, r, plain) (BROKEN == 11 -> 0 : (n) * ROUNDS_OF(s, r, plain))
#define ROUND_THERE(q) (k >= ROUNDS_OF(q, p, wplain) || landed[L(q,p)] > OLD(nd, q, p, wplain) + k)
#define MAY_SEND(q) (k == 0 || k - 1 + W >= ROUNDS_OF(p, q, wplain) || BROKEN == 4 || \
    credit[L(p,q)] >= OLD(nd, p, q, wplain) + k + (BROKEN == 14 -> 1 : 0))
#define ASKED(q) (k >= ROUNDS_OF(q, p, rplain) || asked[L(q,p)] > OLD(nc, q, p, rplain) + k)
#define RETURNED(q) (k == 0 || k > ROUNDS_OF(p, q, rplain) || returned[L(p,q)] >= OLD(nc, p, q, rplain) + k)
#define IN_ROWS(s) (((DEST(s) & B(p)) -> 1 : 0) * ((1 << TOKENS(s)) - 1) << ((s) * T))
#define EXPECTED (IN_ROWS(0) | IN_ROWS(1) | IN_ROWS(2) | IN_ROWS(3))

/* ---- Steps of work ---- */
/* For each peer q of which `used` is true, one atomic step or several; AFTER ends the last one. */
#define SKIP(used) do :: q < 4 && !(used) -> q++ :: else -> break od
#define EACH(used) atomic { q = 0; SKIP(used) }; do :: q < 4 ->
#define AFTER(used) q++; SKIP(used)
#define END :: else -> q = 0; break od

#if BROKEN == 4                        /* the rooms of an inbox belong to no source */
#define ROOM(q) many[q] < W -> many[q]++
#define give_credit() atomic { credit[L(q,p)]++; many[p]-- }
#else
#define ROOM(q) true
#define give_credit() credit[L(q,p)]++
#endif
/* Puts round r of the own tokens to every relay. */
#define SENT(r) (r < ROUNDS_OF(p, q, wplain))
inline send(r) {
  EACH(SENT(r)) atomic { ROOM(q); FILL(slot, p, q, r); landed[L(p,q)]++; AFTER(SENT(r)) }
  END
}
/* As a relay: round k of every source, then its credit. */
#define TAKEN (k < ROUNDS_OF(q, p, wplain) && (BROKEN != 15 || ROUND_THERE(q)))
inline take_rounds() {
  EACH(TAKEN)
#if BROKEN == 1
    give_credit();
    atomic { d_step { place_round(q, k); CLEAR(slot, q, p, k) }; AFTER(TAKEN) }
#else
    d_step { place_round(q, k); CLEAR(slot, q, p, k) };
    atomic { give_credit(); AFTER(TAKEN) }
#endif
  END
}
/* The own tokens to the ranks of this node that are written in place. */
inline place_own() {
  d_step {
    i = 0;
    do
    :: i < TOKENS(p) -> d = 0;
       do
       :: d < 4 -> if :: (DEST(p) & NODE(p) & B(d)) && (d == p || !(wplain & B(d))) -> place(p, i) :: else fi; d++
       :: else -> break
       od; i++
    :: else -> break
    od; i = 0; d = 0 }
}
/* Asks every relay for round r of the own tokens. */
#define ASKS(r) (r < ROUNDS_OF(p, q, rplain))
inline ask_for(r) {
  EACH(ASKS(r)) atomic { FILL(slot, p, q, r); asked[L(p,q)]++; AFTER(ASKS(r)) }
  END
}
/* Rank p reads rows: of ranks in their combine, in place or its own. */
inline read_rows() {                        /* the ranks `from` */
  d = 0;
  do :: d < 4 -> assert(!((from) & B(d)) || (now[d] == h + 1 && (d == p || !(rplain & B(d))))); d++ :: else -> break od;
  d = 0; from = 0
}
/* As a relay: round k of every source, read and returned. */
#define GIVEN (k < ROUNDS_OF(q, p, rplain))
inline give_back() {
  EACH(GIVEN)
    d_step { from = VIA(q, p, rplain); read_rows(); CLEAR(slot, q, p, k) };
    atomic { FILL(back, q, p, k); returned[L(q,p)]++;
#if BROKEN == 13
      credit[L(q,p)]++;
#endif
      AFTER(GIVEN) }
  END
}
/* The rows of round k - 1 that relays have returned: bit (relay, token) of rows[p]. */
#define GOT (k - 1 < ROUNDS_OF(p, q, rplain))
inline take_back() {
  EACH(GOT)
    atomic { d_step { CLEAR(back, p, q, k - 1); i = (k - 1) * C;
        do :: i < LAST(p, k - 1) -> assert(!(rows[p] & ROW(q, i))); rows[p] = rows[p] | ROW(q, i); i++
           :: else -> break od; i = 0 }; AFTER(GOT) }
  END
}
#define BACK_ROWS(r) (((1 << (ROUNDS_OF(p, r, rplain) -> TOKENS(p) : 0)) - 1) << ((r) * T))
#define ALL_BACK (BACK_ROWS(0) | BACK_ROWS(1) | BACK_ROWS(2) | BACK_ROWS(3))

#if FORM == 1
proctype Rank(byte p, wplain, rplain) {  /* its number; ranks that are plain in dispatch and combine */
  byte h, nd, nc, k, q;                /* operation; dispatches and combines before it; turn; peer */
  do
  :: h == OPS -> break
  :: h < OPS && !COMBINE(h) ->
     (BROKEN == 5 || ALL(FREE));                             /* HD_READY */
     d_step { rows[p] = 0; now[p] = h + 1 };
     ready[p] = h + 1;
     (BROKEN == 6 || ready[MATE(p)] > h);
     place_own();                                            /* HD_ROWS */
     k = 0; do :: k < W -> send(k); k++ :: else -> k = 0; break od;
     do
     :: k < TURNS ->
        if                                                   /* gate of turn k */
        :: BROKEN != 15 && ALL(ROUND_THERE) && ALL(MAY_SEND)
        :: BROKEN == 15 && ANY(ROUND_THERE) && ALL(MAY_SEND)
        fi;
        if :: k > 0 -> send(k - 1 + W) :: else fi;           /* its work */
        take_rounds(); k++
     :: else -> k = 0; break
     od;
     data[p] = h + 1;
     (BROKEN == 7 || data[MATE(p)] > h);                     /* HD_DATA */
     d_step { assert(rows[p] == EXPECTED); now[p] = 0; rows[p] = 0; nd++; h++ }
  :: h < OPS && COMBINE(h) ->
     now[p] = h + 1;
     shown[p] = h + 1;                                       /* publish */
     (BROKEN == 3 || ALL(FREE));
     (BROKEN == 8 || shown[MATE(p)] > h);                    /* HC_DATA */
     k = 0; do :: k < W -> ask_for(k); k++ :: else -> k = 0; break od;
     do
     :: k <= TURNS ->
        (ALL(ASKED) && ALL(RETURNED));
        give_back();
        if :: k > 0 && BROKEN == 10 -> ask_for(k - 1 + W); take_back()
           :: k > 0 && BROKEN != 10 -> take_back(); ask_for(k - 1 + W)
           :: else fi; k++
     :: else -> break
     od;
     k = 0;
     d_step { from = (DEST(p) & NODE(p)) & (~rplain | B(p)); read_rows() };
     done[p] = h + 1;
     (BROKEN == 9 || done[MATE(p)] > h);                     /* HC_DONE */
     d_step { assert(rows[p] == ALL_BACK); now[p] = 0; rows[p] = 0; nc++; h++ }
  od
}

#else

/* ---- FORM 0 and 2: inboxes ---- */
#define M MATE(p)
#define O RELAY(p)
#define IF(condition, n) ((condition) -> (n) : 0)
#define OWN(plain) IF(DEST(p) & B(M) & plain, TOKENS(p))           /* own rows for, or of, the plain mate */
#define RELAYED IF(DEST(O) & NODE(p), TOKENS(O))                   /* rows that pass through this relay */
#define BOXED(plain) IF(plain & B(p), IF(DEST(M) & B(p), TOKENS(M)) + IF(DEST(RELAY(M)) & B(p), TOKENS(RELAY(M))))
#define NUMBER(s, j) (1 + (h * 4 + (s)) * T + (j))
#define MINE ((h * 4 + 4) * T >= box[p] && h * 4 * T < box[p])
#define SEND(r) FILL(slot, p, O, r); landed[L(p,O)]++
#define HERE(counter, n, plain, j) (counter[L(O,p)] > OLD(n, O, p, plain) + (j) / C)
#define ROUND_ENDS(j) ((j) % C == 0 || (j) == TOKENS(O))
#define ROUNDS_TO(j) ((j) == TOKENS(O) -> ROUNDS(O) : (j) / C)     /* rounds that end before row j */
#define FOR_MATE(plain) (DEST(O) & B(M) & plain)

/* Row fwd of the round that is here: to its places in this node, and to the mate's inbox if that is plain. */
inline forward() {
  assert(slot[SLOT(O, p, fwd / C)] == VALUE(h, fwd / C)); i = fwd;
  if :: DEST(O) & B(p) -> d = p; place(O, i) :: else fi;
  if :: (DEST(O) & B(M)) && !(wplain & B(M)) -> d = M; place(O, i) :: else fi;
  if :: FOR_MATE(wplain) -> assert(box[M] == 0); box[M] = NUMBER(O, i) :: else fi;
  fwd++; d = 0; i = 0;
  if :: ROUND_ENDS(fwd) -> CLEAR(slot, O, p, (fwd - 1) / C) :: else fi
}
inline drain() {
  assert(MINE); i = (box[p] - 1) % T; from = ((box[p] - 1) / T) % 4; d = p;
  place(from, i); box[p] = 0; in++; i = 0; d = 0; from = 0
}
inline put_own() { box[M] = NUMBER(p, own); own++ }

#if FORM == 3
#define FREED (BROKEN == 31 -> 0 : 1)                        /* turns behind the one that takes */
#define STEPPED(k) (BROKEN == 32 || steps[M] >= nd * (TURNS + 2) + (k))
/* Rows of round n: those of s that are written in place; those for this plain rank. */
inline in_place(s, n) {
  i = (n) * C;
  do
  :: i < LAST(s, n) ->
     if :: DEST(s) & B(p) -> d = p; place(s, i) :: else fi;
     if :: (DEST(s) & B(M)) && !(wplain & B(M)) -> d = M; place(s, i) :: else fi; i++
  :: else -> break
  od; i = 0; d = 0
}
inline own_rows(s, n) {
  i = (n) * C; d = p;
  do :: i < LAST(s, n) -> place(s, i); i++ :: else -> break od; i = 0; d = 0
}
#endif

proctype Rank(byte p, wplain, rplain) {
  byte h, nd, nc, k, q;
  byte out, own, fwd, credits, in, took, asks; /* rounds sent, own rows, rows relayed, credits, rows drained, ... */
  do
  :: h == OPS -> break
  :: h < OPS && !COMBINE(h) ->
     FREE(O);                                                /* HD_READY */
     d_step { rows[p] = 0; now[p] = h + 1 };
     ready[p] = h + 1;
     ready[M] > h;
     place_own();
#if FORM == 0
     do :: own < OWN(wplain) -> atomic { box[M] == 0 -> put_own() } :: else -> break od;
     do :: out < W && out < ROUNDS_OF(p, O, wplain) -> atomic { SEND(out); out++ } :: else -> break od;
     do
     :: k < TURNS ->
        ROUND_THERE(O) && MAY_SEND(O);                       /* gate of turn k */
        if :: atomic { box[p] != 0 -> d_step { drain() } } :: atomic { box[p] == 0 -> true } fi;
        if :: out < ROUNDS_OF(p, O, wplain) && k > 0 -> atomic { SEND(out); out++ } :: else fi;
        do
        :: fwd < RELAYED && fwd < (k + 1) * C -> atomic { (!FOR_MATE(wplain) || box[M] == 0) -> d_step { forward() } }
        :: else -> break
        od;
        if :: k < ROUNDS_OF(O, p, wplain) -> credit[L(O,p)]++ :: else fi;
        k++
     :: else -> break
     od;
     do :: in < BOXED(wplain) -> atomic { box[p] != 0 -> d_step { drain() } } :: else -> break od;
#elif FORM == 3
     do :: out < W && out < ROUNDS_OF(p, O, wplain) -> atomic { SEND(out); out++ } :: else -> break od;
     do
     :: k < TURNS + 2 ->
        ROUND_THERE(O) && STEPPED(k) && (k < 3 || k - 3 + W >= ROUNDS_OF(p, O, wplain) ||   /* gate of turn k */
            credit[L(p,O)] >= OLD(nd, p, O, wplain) + k - 2);
        if :: k >= 3 && out < ROUNDS_OF(p, O, wplain) -> atomic { SEND(out); out++ } :: else fi;
        if :: k * C < OWN(wplain) -> atomic { assert(window[2 * p + k % 2] == 0); window[2 * p + k % 2] = VALUE(h, k) }
           :: else fi;
        if :: k < ROUNDS_OF(O, p, wplain) -> d_step { in_place(O, k) } :: else fi;
        if :: k > 0 && (wplain & B(p)) && k - 1 < ROUNDS_OF(RELAY(M), M, wplain) && (DEST(RELAY(M)) & B(p)) ->
              d_step { own_rows(RELAY(M), k - 1); assert(slot[SLOT(RELAY(M), M, k - 1)] == VALUE(h, k - 1)) }
           :: else fi;
        if :: k > 0 && (wplain & B(p)) && (k - 1) * C < TOKENS(M) && (DEST(M) & B(p)) ->
              d_step { assert(window[2 * M + (k - 1) % 2] == VALUE(h, k - 1)); own_rows(M, k - 1);
                window[2 * M + (k - 1) % 2] = 0 }
           :: else fi;
        if :: k > FREED && k - 1 - FREED < ROUNDS_OF(O, p, wplain) ->
              atomic { CLEAR(slot, O, p, k - 1 - FREED); credit[L(O,p)]++ }
           :: else fi;
        steps[p]++; k++
     :: else -> break
     od;
#else
     do                                                      /* polls: whatever is possible */
     :: atomic { out < ROUNDS_OF(p, O, wplain) && (out < W || credit[L(p,O)] >= OLD(nd, p, O, wplain) + out - W + 1) ->
          SEND(out); out++ }
     :: atomic { own < OWN(wplain) && (BROKEN == 21 || box[M] == 0) -> box[M] == 0 -> put_own() }
     :: atomic { fwd < RELAYED && HERE(landed, nd, wplain, fwd) && (BROKEN == 21 || !FOR_MATE(wplain) || box[M] == 0) ->
          (!FOR_MATE(wplain) || box[M] == 0) -> d_step { forward() } }
     :: atomic { credits < ROUNDS_OF(O, p, wplain) && (BROKEN == 22 -> HERE(landed, nd, wplain, credits * C) :
                                                       credits < ROUNDS_TO(fwd)) -> credit[L(O,p)]++; credits++ }
     :: atomic { box[p] != 0 && in < BOXED(wplain) -> d_step { drain() } }
     :: in == BOXED(wplain) && out == ROUNDS_OF(p, O, wplain) && own == OWN(wplain) &&
        (BROKEN == 23 || (fwd == RELAYED && credits == ROUNDS_OF(O, p, wplain))) -> break
     od;
#endif
     data[p] = h + 1;
     (BROKEN == 7 || data[M] > h);                           /* HD_DATA */
     d_step { assert(rows[p] == EXPECTED); now[p] = 0; rows[p] = 0; nd++; h++;
       out = 0; own = 0; fwd = 0; credits = 0; in = 0; k = 0 }
  :: h < OPS && COMBINE(h) ->
     now[p] = h + 1;
     shown[p] = h + 1;                                       /* publish */
     (BROKEN == 3 || FREE(O));
     shown[M] > h;                                           /* HC_DATA */
     do
     :: atomic { out < ROUNDS_OF(p, O, rplain) && out < took + W -> FILL(slot, p, O, out); asked[L(p,O)]++; out++ }
     :: atomic { own < OWN(rplain) && asks == 0 && ask[M] == 0 -> ask[M] = NUMBER(p, own); asks = 1 }
     :: atomic { fwd < RELAYED && HERE(asked, nc, rplain, fwd) && FOR_MATE(rplain) && asks == 0 && ask[M] == 0 ->
          ask[M] = NUMBER(O, fwd); asks = 2 }
     :: atomic { fwd < RELAYED && HERE(asked, nc, rplain, fwd) && !FOR_MATE(rplain) ->
          d_step { from = DEST(O) & NODE(p); read_rows() }; fwd++ }
     :: atomic { reply[p] != 0 ->
          assert(reply[p] == (asks == 1 -> NUMBER(p, own) : NUMBER(O, fwd)));
          own = (asks == 1 -> own + 1 : own); fwd = (asks == 2 -> fwd + 1 : fwd); reply[p] = 0; asks = 0 }
     :: atomic { credits < ROUNDS_OF(O, p, rplain) && credits < ROUNDS_TO(fwd) ->
          CLEAR(slot, O, p, credits); FILL(back, O, p, credits); returned[L(O,p)]++; credits++ }
     :: atomic { ask[p] != 0 && reply[M] == 0 -> assert((h * 4 + 4) * T >= ask[p] && h * 4 * T < ask[p]);
          reply[M] = ask[p]; ask[p] = 0; in++ }
     :: atomic { took < out && returned[L(p,O)] > OLD(nc, p, O, rplain) + took -> k = took + 1; q = O;
          d_step { CLEAR(back, p, q, k - 1); i = took * C;
            do :: i < LAST(p, took) -> assert(!(rows[p] & ROW(q, i))); rows[p] = rows[p] | ROW(q, i); i++
               :: else -> break od; i = 0 }; took++; k = 0; q = 0 }
     :: took == ROUNDS_OF(p, O, rplain) && own == OWN(rplain) && fwd == RELAYED && credits == ROUNDS_OF(O, p, rplain) &&
        (BROKEN == 23 || in == BOXED(rplain)) -> break
     od;
     k = 0;
     d_step { from = (DEST(p) & NODE(p)) & (~rplain | B(p)); read_rows() };
     done[p] = h + 1;
     (BROKEN == 9 || done[M] > h);                           /* HC_DONE */
     d_step { assert(rows[p] == ALL_BACK); now[p] = 0; rows[p] = 0; nc++; h++;
       out = 0; own = 0; fwd = 0; credits = 0; in = 0; took = 0 }
  od
}
#endif

init {
  byte z = 0, w = PLAIN, r = PLAIN;
#if PLAIN == 16
  atomic { select(w: 0..15); if :: r = w :: w > 0 && w < 15 -> r = 15 - w fi };
#endif
  atomic { do :: z < 4 -> run Rank(z, w, r); z++ :: else -> break od; z = 0; w = 0; r = 0 }
}
