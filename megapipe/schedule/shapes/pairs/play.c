/* A play of a table in which ranks run together what is ready: together.py says what it does, in the same order. */

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { F, B, W, BW };
static const double SMALL = 1e-9;

typedef struct {
    int ranks, stages, microbatches, chunks, split; /* chunks: most stages of a rank. A pass: stage * microbatches + i */
    const int *rank_of, *local, *next, *prev;       /* of each stage; -1: none */
    const double *held, *owes, *lag_next, *lag_prev;
    const int *forwards, *backwards, *begin; /* begin[r]: where rank r begins in both; begin[ranks]: the end */
    const double *alone, *pairs;             /* by kind and stage; by rank, kind and place of both */
    const double *limits;                    /* with the hair that rounding needs */
    double forward;                          /* the longest */
} Table;

typedef struct {
    double wait, forwards_from;
    int reach, backwards, weights, keep;
    const double *spare;
} PairingPolicy;

typedef struct { int kind, pass; } Item;

typedef struct {
    int *order[2], at[2], stop, *owed, owed_at, owed_stop, *steps, made; /* steps: kind, pass, kind, pass or -1 */
    double room, free;
} Row;

typedef struct { double time; int rank; } Event;

typedef struct {
    const Table *t;
    const PairingPolicy *m;
    Row *rows;
    double *there[2]; /* when the input of a forward and of a backward is there */
    Event *events;
    int count;
} Play;

static int is_before(Event a, Event b) { return a.time < b.time || (a.time == b.time && a.rank < b.rank); }

static void add(Play *p, double time, int rank) {
    int i = p->count++;
    Event e = {time, rank};
    for (; i && is_before(e, p->events[(i - 1) / 2]); i = (i - 1) / 2) p->events[i] = p->events[(i - 1) / 2];
    p->events[i] = e;
}

static Event take(Play *p) {
    Event first = p->events[0], e = p->events[--p->count];
    int i = 0;
    for (int child; (child = 2 * i + 1) < p->count; i = child) {
        if (child + 1 < p->count && is_before(p->events[child + 1], p->events[child])) child++;
        if (!is_before(p->events[child], e)) break;
        p->events[i] = p->events[child];
    }
    p->events[i] = e;
    return first;
}

static double length(const Table *t, Item a, Item b) {
    int m = t->microbatches, sa = a.pass / m, rank = t->rank_of[sa], wide = 4 * t->chunks;
    if (b.pass < 0) return t->alone[a.kind * t->stages + sa];
    int one = a.kind * t->chunks + t->local[sa], other = b.kind * t->chunks + t->local[b.pass / m];
    return t->pairs[(rank * wide + one) * wide + other];
}

static double first(const Play *p, const Row *row, int way, double late, int but, int *found) {
    double best = INFINITY;
    int end = row->at[way] + p->m->reach + (but >= 0), m = p->t->microbatches;
    *found = -1;
    for (int i = row->at[way]; i < end && i < row->stop; i++) {
        int x = row->order[way][i], seen = x == but;
        for (int j = row->at[way]; j < i && !seen; j++)
            seen = row->order[way][j] != but && row->order[way][j] / m == x / m;
        if (seen) continue;
        double comes = p->there[way][x];
        if (comes <= late) {
            *found = x;
            return comes;
        }
        if (comes < best) best = comes, *found = x;
    }
    return best;
}

static int choose(Play *p, Row *row, int rank, double now, Item *a, Item *b) {
    const Table *t = p->t;
    const PairingPolicy *m = p->m;
    double late = now * (1 + SMALL) + SMALL * t->forward, wait = m->wait * t->forward;
    int f, back, other, micro = t->microbatches, kind;
    double f_comes = first(p, row, F, late, -1, &f), b_comes = first(p, row, B, late, -1, &back);
    int full = f >= 0 && t->held[f / micro] > row->room, owes = row->owed_stop > row->owed_at;
    if (full) f = -1, f_comes = INFINITY;
    b->kind = W, b->pass = -1;
    if (f >= 0 && back >= 0 && f_comes <= late && b_comes <= late) {
        *a = (Item){F, f}, *b = (Item){BW, back};
        return 1;
    }
    for (int turn = 0; turn < 2; turn++) {
        double mine = turn ? f_comes : b_comes, others = turn ? b_comes : f_comes;
        if (mine <= late && late < others && others <= late + wait) {
            add(p, others, rank);
            return 0;
        }
    }
    Item oldest = {W, owes ? row->owed[row->owed_at] : -1};
    if (back >= 0 && b_comes <= late) {
        double owed = t->owes[back / micro] - t->held[back / micro]; /* what it takes if its W waits */
        int both = m->backwards && first(p, row, B, late, back, &other) <= late && other >= 0;
        if (both) owed += t->owes[other / micro] - t->held[other / micro];
        kind = t->split && owed <= row->room ? B : BW;
        *a = (Item){kind, back}, *b = both ? (Item){kind, other} : oldest;
        return 1;
    }
    if (f >= 0 && f_comes <= late) {
        *a = (Item){F, f};
        if (m->weights) *b = oldest;
        if (f % micro >= m->forwards_from && first(p, row, F, late, f, &other) <= late && other >= 0 &&
            t->held[f / micro] + t->held[other / micro] <= row->room)
            *b = (Item){F, other};
        return 1;
    }
    if (row->owed_stop - row->owed_at > (full || row->at[B] == row->stop ? 0 : m->keep)) {
        Item none = {W, -1};
        *a = oldest;
        return (f_comes < b_comes ? f_comes : b_comes) >= now + length(t, oldest, none) / 2;
    }
    return 0;
}

static void leave(Row *row, int way, int pass) {
    int i = row->at[way];
    while (row->order[way][i] != pass) i++;
    memmove(row->order[way] + row->at[way] + 1, row->order[way] + row->at[way], sizeof(int) * (i - row->at[way]));
    row->at[way]++;
}

static void run(Play *p, Row *row, int rank, double now, Item a, Item b) {
    const Table *t = p->t;
    double end = row->free = now + length(t, a, b);
    int *step = row->steps + 4 * row->made++, m = t->microbatches;
    step[0] = a.kind, step[1] = a.pass, step[2] = b.kind, step[3] = b.pass;
    add(p, end, rank);
    for (int n = 0; n < (b.pass < 0 ? 1 : 2); n++) {
        Item x = n ? b : a;
        int stage = x.pass / m, i = x.pass % m, to, way = x.kind == F ? F : B;
        if (x.kind == W) {
            row->owed_at++;
            row->room += t->owes[stage];
            continue;
        }
        leave(row, way, x.pass);
        if (x.kind == F) {
            row->room -= t->held[stage];
            to = t->next[stage];
            if (to < 0) p->there[B][x.pass] = end;
        } else {
            row->room += t->held[stage] - (x.kind == B ? t->owes[stage] : 0);
            if (x.kind == B) row->owed[row->owed_stop++] = x.pass;
            to = t->prev[stage];
        }
        if (to < 0) continue;
        double comes = end + (x.kind == F ? t->lag_next : t->lag_prev)[stage];
        p->there[way][to * m + i] = comes;
        add(p, comes, t->rank_of[to]);
    }
}

/* The end of the last step if each starts as soon as it can: simulate.py. there[]: when inputs are there. */
static double clock_of(const Table *t, Row *rows, double *const there[2]) {
    int n = t->stages * t->microbatches, m = t->microbatches, moved = 1;
    double most = 0.0;
    for (int r = 0; r < t->ranks; r++) rows[r].free = 0.0, rows[r].stop = 0;
    for (int x = 0; x < n; x++) there[F][x] = t->prev[x / m] < 0 ? 0.0 : INFINITY, there[B][x] = INFINITY;
    while (moved) {
        moved = 0;
        for (int r = 0; r < t->ranks; r++) {
            Row *row = rows + r;
            for (; row->stop < row->made; row->stop++, moved = 1) {
                const int *step = row->steps + 4 * row->stop;
                Item items[2] = {{step[0], step[1]}, {step[2], step[3]}};
                double start = row->free;
                int count = items[1].pass < 0 ? 1 : 2;
                for (int k = 0; k < count; k++) { /* W follows its B on the same rank */
                    double comes = items[k].kind == W ? 0.0 : there[items[k].kind == F ? F : B][items[k].pass];
                    if (comes > start) start = comes;
                }
                if (isinf(start)) break;
                row->free = start + length(t, items[0], items[1]);
                if (row->free > most) most = row->free;
                for (int k = 0; k < count; k++) {
                    int stage = items[k].pass / m, i = items[k].pass % m;
                    if (items[k].kind == W) continue;
                    int to = items[k].kind == F ? t->next[stage] : t->prev[stage];
                    double lag = to < 0 ? 0.0 : (items[k].kind == F ? t->lag_next : t->lag_prev)[stage];
                    if (to >= 0) there[items[k].kind == F ? F : B][to * m + i] = row->free + lag;
                    else if (items[k].kind == F) there[B][items[k].pass] = row->free;
                }
            }
        }
    }
    return most;
}

/* The makespan of a play, below 0 if ranks wait for each other for ever. made[r] steps of rank r from
   steps + 12 * begin[r] on: each forward and backward, and each W, is in one of four numbers. */
double play(const Table *t, const PairingPolicy *m, int *steps, int *made) {
    int n = t->stages * t->microbatches, all = t->begin[t->ranks];
    Row *rows = calloc(t->ranks, sizeof(Row));
    int *due = calloc(t->ranks, sizeof(int)), *whole = malloc(sizeof(int) * 3 * all);
    double *there = malloc(sizeof(double) * 2 * n), end = -1.0;
    Play p = {t, m, rows, {there, there + n}, malloc(sizeof(Event) * (12 * (size_t)all + 2 * t->ranks)), 0};
    if (!rows || !due || !whole || !there || !p.events) goto out;
    memcpy(whole, t->forwards, sizeof(int) * all);
    memcpy(whole + all, t->backwards, sizeof(int) * all);
    for (int x = 0; x < n; x++) there[x] = t->prev[x / t->microbatches] < 0 ? 0.0 : INFINITY, there[n + x] = INFINITY;
    for (int r = 0; r < t->ranks; r++) {
        Row *row = rows + r;
        int from = t->begin[r];
        row->order[F] = whole + from, row->order[B] = whole + all + from, row->owed = whole + 2 * all + from;
        row->stop = t->begin[r + 1] - from;
        row->steps = steps + 12 * from;
        row->room = t->limits[r] - m->spare[r];
        add(&p, 0.0, r);
    }
    while (p.count) {
        Event e = take(&p);
        double now = e.time;
        memset(due, 0, sizeof(int) * t->ranks);
        due[e.rank] = 1;
        while (p.count && p.events[0].time <= now * (1 + SMALL)) due[take(&p).rank] = 1;
        for (int r = 0; r < t->ranks; r++) {
            Item a, b;
            if (due[r] && rows[r].free <= now * (1 + SMALL) && choose(&p, rows + r, r, now, &a, &b))
                run(&p, rows + r, r, now, a, b);
        }
    }
    for (int r = 0; r < t->ranks; r++) {
        Row *row = rows + r;
        if (row->at[F] < row->stop || row->at[B] < row->stop) goto out;
        for (; row->owed_at < row->owed_stop; row->owed_at++) {
            int *step = row->steps + 4 * row->made++;
            step[0] = W, step[1] = row->owed[row->owed_at], step[2] = W, step[3] = -1;
        }
        made[r] = row->made;
    }
    end = clock_of(t, rows, p.there);
out:
    free(rows), free(due), free(whole), free(there), free(p.events);
    return end;
}
