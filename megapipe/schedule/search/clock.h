/* The clock of a search, compiled: orders.py says what a problem is, and has the same sums in the same order. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    int passes, microbatches, ranks, stages, period;
    double unit;
    const double *duration, *lag, *holds, *memory; /* memory: limits with the hair that rounding needs */
    const int *source, *target, *rank, *row;       /* row[r]: where rank r begins in an order; row[ranks]: its end */
    const double *normal, *decay;                  /* 1024 quantiles of each */
} Problem;

typedef struct {
    int *orders, *best_orders, *path; /* path: of the orders, while path_length is not 0 */
    double *end, *best_end;
    double cost, best, heat, cooler, spread, goal;
    uint64_t draws;
    int path_length;
} State;

typedef struct {
    int *order, *moved, *bare, *owed, *next, *mark, *at, *size, *paid, *owes, *ready; /* one number each, or for each rank */
    double *end, *times, *now, *held, *rest;
} Scratch;

static int kind_of(const Problem *p, int x) { return x / p->microbatches % 3; }

/* The time of a rank that the objective counts: its end for the makespan, its span for the period. */
static double end_of(const Problem *p, const int *order, const double *end, int r) {
    double e = end[order[p->row[r + 1] - 1]];
    int first = order[p->row[r]];
    return p->period ? e - end[first] + p->duration[first] : e;
}

/* The objective: the maximum over ranks, plus the mean by the weight `spread`. The maximum alone is flat: most moves change
   other ranks than the last one to end, and the mean says whether they lead somewhere. */
static double length(const Problem *p, const int *order, const double *end, double spread) {
    double most = 0.0, sum = 0.0;
    for (int r = 0; r < p->ranks; r++) {
        double e = end_of(p, order, end, r);
        if (r == 0 || e > most) most = e;
        sum += e;
    }
    return most + spread * sum / p->ranks;
}

/* Plays on from at[] and now[]. Returns 0 if ranks deadlock, or once the length must be above the limit. rest[r] is the
   least possible end of rank r: the time so far and all passes to come, without a wait. */
static int play(const Problem *p, const int *order, double *end, Scratch *s, double limit, double spread) {
    const int *row = p->row;
    int ready = 0, left = 0, n = p->passes;
    double most = 0.0, sum = 0.0; /* of the ranks' ends, were there no more waiting */
    for (int r = 0; r < p->ranks; r++) {
        s->ready[ready++] = r;
        left += row[r + 1] - s->at[r];
        if (s->rest[r] > most) most = s->rest[r];
        sum += s->rest[r];
    }
    while (ready) {
        int r = s->ready[--ready], i = s->at[r], stop = row[r + 1];
        double t = s->now[r], idle = 0.0;
        left += i;
        while (i < stop) {
            int x = order[i];
            double arrival = end[p->source[x]];
            if (arrival < 0.0) break;
            arrival += p->lag[x];
            if (arrival > t) {
                idle += arrival - t;
                t = arrival;
            }
            t += p->duration[x];
            end[x] = t;
            i++;
            int y = p->target[x];
            if (y != n) {
                int q = p->rank[y];
                if (s->at[q] < row[q + 1] && order[s->at[q]] == y) s->ready[ready++] = q;
            }
        }
        left -= i;
        s->at[r] = i;
        s->now[r] = t;
        if (idle > 0.0 && !p->period) {
            s->rest[r] += idle;
            sum += idle;
            if (s->rest[r] > most) most = s->rest[r];
            if ((most + spread * sum / p->ranks) * (1 - 1e-9) > limit) return 0; /* a hair: other sums, other rounding */
        }
    }
    return left == 0;
}

/* Plays an order that differs from an older one only in passes that there start at t or later. What starts before t has
   the same times in both, and is not played again. */
static int play_from(const Problem *p, const int *old, const double *was, double t, const int *order, double *end,
                     Scratch *s, double limit, double spread) {
    memcpy(end, was, sizeof(double) * (p->passes + 1));
    t *= 1 - 1e-9; /* a start is an end less a duration, rounded */
    for (int r = 0; r < p->ranks; r++) {
        int low = p->row[r], high = p->row[r + 1];
        while (low < high) {
            int middle = (low + high) / 2, x = old[middle];
            if (was[x] - p->duration[x] < t) low = middle + 1;
            else high = middle;
        }
        s->at[r] = low;
        s->now[r] = s->rest[r] = low > p->row[r] ? was[old[low - 1]] : 0.0;
        for (int i = low; i < p->row[r + 1]; i++) {
            s->rest[r] += p->duration[order[i]];
            end[order[i]] = -1.0;
        }
    }
    return play(p, order, end, s, limit, spread);
}

/* fit.fill_weights: orders of F and B in bare, size[r] of rank r; full has W where a rank waits or needs the memory. */
static int fill_weights(const Problem *p, const int *bare, double patience, int *full, double *end, Scratch *s) {
    int n = p->passes, ready = 0, left = 0;
    for (int x = 0; x < n; x++) end[x] = -1.0;
    end[n] = 0.0;
    for (int r = 0; r < p->ranks; r++) {
        s->at[r] = s->paid[r] = s->owes[r] = 0;
        s->now[r] = s->held[r] = 0.0;
        s->ready[ready++] = r;
        left += s->size[r];
    }
    while (ready) {
        int r = s->ready[--ready], i = s->at[r], w = s->paid[r], owes = s->owes[r];
        const int *order = bare + p->row[r];
        int *owed = s->owed + p->row[r], *out = full + p->row[r] + i + w;
        double t = s->now[r], held = s->held[r], limit = p->memory[r];
        left += i;
        while (i < s->size[r]) {
            int x = order[i];
            double arrival = end[p->source[x]];
            if (arrival < 0.0) break;
            arrival += p->lag[x];
            for (; w < owes; w++) {
                int y = owed[w];
                double slack = patience * p->duration[y] + 1e-9 * arrival;
                if (held + p->holds[x] <= limit && t + p->duration[y] > arrival + slack) break;
                t += p->duration[y];
                end[y] = t;
                *out++ = y;
                held += p->holds[y];
            }
            held += p->holds[x];
            if (held > limit) return 0;
            t = (arrival > t ? arrival : t) + p->duration[x];
            end[x] = t;
            *out++ = x;
            i++;
            if (kind_of(p, x)) owed[owes++] = x + p->microbatches;
            int y = p->target[x];
            if (y != n) {
                int q = p->rank[y];
                if (s->at[q] < s->size[q] && bare[p->row[q] + s->at[q]] == y) s->ready[ready++] = q;
            }
        }
        left -= i;
        s->at[r] = i, s->now[r] = t, s->held[r] = held, s->paid[r] = w, s->owes[r] = owes;
    }
    if (left) return 0;
    for (int r = 0; r < p->ranks; r++) {
        int *owed = s->owed + p->row[r], *out = full + p->row[r] + s->at[r] + s->paid[r];
        double t = s->now[r];
        for (int w = s->paid[r]; w < s->owes[r]; w++) end[*out++ = owed[w]] = t += p->duration[owed[w]];
    }
    return 1;
}
