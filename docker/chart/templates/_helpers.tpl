{{/* A model with what it leaves out: call with (dict "root" $ "model" .), read with fromYaml. */}}
{{- define "penstock.model" -}}
{{- $model := mergeOverwrite (deepCopy .root.Values.defaults) (deepCopy .model) -}}
{{- $image := $model.image -}}
{{- if or $image.repository $image.tag -}}
{{- $image = merge $image (dict "digest" "") -}}
{{- end -}}
{{- $_ := set $model "image" (mergeOverwrite (deepCopy .root.Values.image) $image) -}}
{{- toYaml $model -}}
{{- end -}}

{{/* The image of a model that has its defaults: call with (dict "root" $ "model" $model). */}}
{{- define "penstock.image" -}}
{{- $image := .model.image -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Labels of the pod of `helm test`. */}}
{{- define "penstock.testLabels" -}}
app.kubernetes.io/name: penstock-test
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.name" -}}
{{- printf "%s-%s" .root.Release.Name .model.name | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "penstock.releaseLabels" -}}
app.kubernetes.io/name: penstock
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "penstock.selector" -}}
{{ include "penstock.releaseLabels" .root }}
app.kubernetes.io/component: {{ .model.name }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end -}}

{{/* A value as a variable holds it. Helm reads numbers as floats, whose text would be 6.4e+07. */}}
{{- define "penstock.text" -}}
{{- if kindIs "string" . -}}{{- . -}}{{- else -}}{{- toJson . -}}{{- end -}}
{{- end -}}

{{- define "penstock.keysSecret" -}}
{{- .Values.apiKeys.existingSecret | default (printf "%s-api-keys" .Release.Name) -}}
{{- end -}}

{{- define "penstock.adminKeysSecret" -}}
{{- .Values.adminKeys.existingSecret | default (printf "%s-admin-keys" .Release.Name) -}}
{{- end -}}

{{- define "penstock.hasAdminKeys" -}}
{{- if or .Values.adminKeys.keys .Values.adminKeys.existingSecret -}}true{{- end -}}
{{- end -}}

{{/* Fails for a secret that would stand in the Deployment in plain text: call with a model that has its defaults. */}}
{{- define "penstock.rejectsecrets" -}}
{{- $model := . -}}
{{- range $setting, $instead := dict "admin_key" "adminKeys" "api_key" "apiKeys" -}}
{{- if hasKey $model.settings $setting -}}
{{- fail (printf "models: %s: settings.%s would show the key in the Deployment: name a Secret in %s.existingSecret, or list the keys in %s.keys, for which the chart makes a Secret" $model.name $setting $instead $instead) -}}
{{- end -}}
{{- end -}}
{{- range $model.env -}}
{{- if and (has (upper (toString .name)) (list "HF_TOKEN" "HUGGING_FACE_HUB_TOKEN" "PENSTOCK_ADMIN_KEY" "PENSTOCK_API_KEY")) .value -}}
{{- fail (printf "models: %s: env: the value of %s would be readable in the Deployment: take it from a Secret by valueFrom.secretKeyRef" $model.name .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.hasKeys" -}}
{{- if or .Values.apiKeys.keys .Values.apiKeys.existingSecret -}}true{{- end -}}
{{- end -}}
